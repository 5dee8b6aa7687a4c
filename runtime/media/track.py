"""The picture track of a video: its packet table, size and turn, without decoding a frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from runtime.media.container import packets
from runtime.media.limits import LIMITS
from runtime.media.movie import Movie, Turn

_LATEST = 1 << 53
"""Ticks beyond which a time stamp is no time; 90 kHz ticks reach it after 3,000 years."""


@dataclass(frozen=True)
class Track:
    """Presentation times of the frames that are shown, rising, and what turns their pixels upright.

    stamps: in units of time_base seconds. end: when the last frame ends. width, height: pixels as coded; aspect: width
    of a pixel / its height; turn: the display matrix.
    """

    stamps: tuple[int, ...]
    end: int
    time_base: Fraction
    width: int
    height: int
    aspect: Fraction
    turn: Turn

    @property
    def zero(self) -> Fraction:
        """The time of the first shown frame, from which start times of pictures and sound count."""
        return self.stamps[0] * self.time_base

    @property
    def seconds(self) -> Fraction:
        """From the first shown frame to the end of the last."""
        return (self.end - self.stamps[0]) * self.time_base

    @property
    def rate(self) -> float:
        """Mean frames a second."""
        if len(self.stamps) == 1:
            return float(1 / self.seconds)
        return float((len(self.stamps) - 1) / ((self.stamps[-1] - self.stamps[0]) * self.time_base))

    @property
    def shown(self) -> tuple[int, int]:
        """Width and height of square pixels, upright."""
        width = int(self.width * self.aspect + Fraction(1, 2))
        return (self.height, width) if self.turn[0] == 0 else (width, self.height)

    def times(self, start: Fraction) -> list[Fraction]:
        """Seconds of every shown frame from `start` seconds after the first."""
        begin = self.zero + start
        return [stamp * self.time_base - begin for stamp in self.stamps]


def video_stream(container: InputContainer) -> VideoStream:
    """The first track of pictures that is no cover image. Raises ValueError without one, or of another codec."""
    streams = [one for one in container.streams.video if not one.disposition & one.disposition.attached_pic]
    if not streams:
        raise ValueError("it has no track of pictures")
    _check_codec(streams[0], LIMITS["video"].codecs)
    return streams[0]


def soundtrack_stream(container: InputContainer) -> AudioStream | None:
    """The first track of sound, None without one. Raises ValueError where it is of another codec."""
    if not container.streams.audio:
        return None
    _check_codec(container.streams.audio[0], LIMITS["video"].sound_codecs)
    return container.streams.audio[0]


def read_track(container: InputContainer, stream: VideoStream, movie: Movie, bytes_maximum: int) -> Track:
    """The track's packet table. Raises ValueError where it has no frames or no usable times."""
    found = [
        (packet.pts, packet.duration or 0)
        for packet in packets(container, stream, bytes_maximum)
        if packet.size and not packet.is_discard
    ]
    stamps = sorted(_checked(stamp) for stamp, _ in found)
    if not stamps:
        raise ValueError("it has no frames")
    base, context = stream.time_base, stream.codec_context
    if not base or base <= 0 or any(late == early for early, late in pairwise(stamps)):
        raise ValueError("its frames have no times of their own")
    aspect = stream.sample_aspect_ratio
    return Track(
        stamps=tuple(stamps),
        end=_end(stamps, max((stamp or 0, duration) for stamp, duration in found)[1]),
        time_base=Fraction(base),
        width=context.width,
        height=context.height,
        aspect=Fraction(aspect) if aspect and aspect > 0 else Fraction(1),
        turn=movie.turns.get(stream.id, (1, 0, 0, 1)),
    )


def upright(pixels: NDArray[np.uint8], turn: Turn) -> NDArray[np.uint8]:
    """Pixels [h, w, 3] as the display matrix shows them."""
    a, b, c, d = turn
    if a == 0:
        return np.ascontiguousarray(pixels.swapaxes(0, 1)[:: b or 1, :: c or 1])
    return np.ascontiguousarray(pixels[:: d or 1, :: a or 1])


def _check_codec(stream: VideoStream | AudioStream, legal: tuple[str, ...]) -> None:
    name = stream.codec_context.name if stream.codec_context is not None else "unknown"
    if name not in legal:
        raise ValueError(f"its {stream.type} track is {name}, not one of {', '.join(legal)}")


def _checked(stamp: int | None) -> int:
    if stamp is None or abs(stamp) > _LATEST:
        raise ValueError(f"a frame has the time stamp {stamp}")
    return stamp


def _end(stamps: Sequence[int], duration: int) -> int:
    """When the last frame ends. Some writers leave its duration out; it then lasts as long as the one before."""
    if not 0 <= duration <= _LATEST:
        raise ValueError(f"a frame has the duration {duration}")
    if not duration and len(stamps) > 1:
        duration = stamps[-1] - stamps[-2]
    return stamps[-1] + max(duration, 1)
