"""What a reference's file shows and sounds like, decoded and fitted as the request was resolved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from plugins.dimensions import FRAMES_PER_SECOND
from runtime.geometry import keyframe_placement
from runtime.media.facts import ImageFacts, VideoFacts
from runtime.media.frames import decode_video
from runtime.media.pixels import decode_image, resize_image
from runtime.media.sound import decode_sound
from runtime.request import Resolved


class ReferencePixels:
    """One reference of a resolved request.

    Frames of a video, uint8 [H, W, 3], are decoded as the VAE asks for them; the few that the text encoder is shown are
    kept on the way, so that a file is decoded once.
    """

    def __init__(self, resolved: Resolved, place: int, data: bytes) -> None:
        """place: of the reference in packed order."""
        self._resolved, self._place, self._data = resolved, place, data
        self._reference = resolved.references[place]
        self._where = f"MEDIA[{place}]"
        self._kept: dict[int, torch.Tensor] = {}

    def frames(self, shown: Collection[int]) -> Iterator[torch.Tensor]:
        """The frames that the VAE sees; those of `shown`, which may be later ones, are kept. Raises RequestError."""
        for index, frame in enumerate(self._decoded()):
            if index in shown:
                self._kept[index] = frame
            if index < self._reference.encoded_frames:
                yield frame

    def shown(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The frames that the text encoder is shown, by their indices at 24 a second. Raises RequestError."""
        missing = set(indices) - set(self._kept)
        if missing:
            self._kept |= {index: frame for index, frame in enumerate(self._decoded()) if index in missing}
        return [self._kept[index] for index in indices]

    def sound(self) -> torch.Tensor:
        """The stereo soundtrack, float32 [2, n] at the audio VAE's rate, cut at the clip's length. RequestError."""
        seconds = self._resolved.frames / FRAMES_PER_SECOND
        return decode_sound(self._data, self._where, self._reference.start_time_seconds, seconds)

    def _decoded(self) -> Iterator[torch.Tensor]:
        one, facts = self._reference, self._reference.facts
        if isinstance(facts, ImageFacts):
            yield _tensor(self._picture(decode_image(self._data, facts, self._where)))
        elif isinstance(facts, VideoFacts):
            size = (one.width, one.height)
            decoded = decode_video(self._data, facts, self._where, one.start_time_seconds, one.frames, size)
            yield from map(_tensor, decoded)

    def _picture(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """An image at the sides that were resolved: a keyframe put on the canvas, a reference resized."""
        size = (self._reference.width, self._reference.height)
        if self._reference.role == "reference":
            return resize_image(pixels, size)
        sides = (pixels.shape[1], pixels.shape[0])
        put = keyframe_placement(self._place, sides, size, self._resolved.keyframe_geometry)
        resized = resize_image(pixels, put.size)
        return resized[put.top : put.top + size[1], put.left : put.left + size[0]]


def _tensor(pixels: NDArray[np.uint8]) -> torch.Tensor:
    # Torch may not share memory that Pillow holds read-only.
    return torch.from_numpy(np.array(pixels))
