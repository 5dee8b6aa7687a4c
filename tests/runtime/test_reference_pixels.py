"""What of a reference's file reaches the encoders: fitted pixels, the frames that are shown, each file decoded once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runtime import reference_pixels
from runtime.media.probe import probe
from runtime.reference_pixels import ReferencePixels
from runtime.references import KnownFile, Role, Target, reference, sha256_of
from tests.media import clips
from tests.request.sizes import RELEASED

TARGET = Target(width=320, height=256, frames=107, image_edge=256, video_edge=768)


def resolved(files: list[bytes], kind: Any, roles: list[Role], geometry: str = "diffusers") -> Any:
    """The fields of a resolved request that the pixels of its references depend on."""
    references = []
    for data, role in zip(files, roles, strict=True):
        known = KnownFile("file", sha256_of(data), len(data), 0.0, probe(data, kind, "file"))
        references.append(reference(known, role, TARGET, RELEASED))
    return SimpleNamespace(references=references, keyframe_geometry=geometry, frames=TARGET.frames)


def only(pixels: ReferencePixels) -> np.ndarray:
    (frame,) = pixels.frames(())
    return frame.numpy()


def test_the_second_keyframe_covers_the_canvas_and_its_middle_is_kept() -> None:
    image = clips.picture(600, 300)
    data = clips.saved(image, "PNG")
    request = resolved([data, data], "image", ["first", "last"])
    stretched = image.resize((320, 256), Image.Resampling.LANCZOS)
    covering = image.resize((512, 256), Image.Resampling.LANCZOS).crop((96, 0, 416, 256))
    assert np.array_equal(only(ReferencePixels(request, 0, data)), np.asarray(stretched))
    assert np.array_equal(only(ReferencePixels(request, 1, data)), np.asarray(covering))
    other = resolved([data, data], "image", ["first", "last"], "vllm-omni")
    assert np.array_equal(only(ReferencePixels(other, 1, data)), np.asarray(stretched))


def test_a_reference_image_has_its_own_short_edge() -> None:
    image = clips.picture(600, 300)
    data = clips.saved(image, "PNG")
    found = only(ReferencePixels(resolved([data], "image", ["reference"]), 0, data))
    assert np.array_equal(found, np.asarray(image.resize((512, 256), Image.Resampling.LANCZOS)))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Frames asked for by each decoding of a video, which then has small sides."""
    counts: list[int] = []
    decode = reference_pixels.decode_video

    def counting(data: bytes, facts: Any, where: str, start: float, count: int, size: tuple[int, int]) -> Any:
        counts.append(count)
        return decode(data, facts, where, start, count, (32, 32))

    monkeypatch.setattr(reference_pixels, "decode_video", counting)
    return counts


def test_a_video_is_decoded_once_for_both_encoders(decoded: list[int]) -> None:
    """60 frames: the VAE sees 56, the text encoder the 12th, 24th, 36th and 48th after the first."""
    data = clips.video(clips.even(2.5, 24))
    request = resolved([data], "video", ["reference"])
    pixels = ReferencePixels(request, 0, data)
    frames = list(pixels.frames({0, 12, 58}))
    assert len(frames) == request.references[0].encoded_frames == 56
    shown = pixels.shown((0, 12, 58, 58))
    assert decoded == [60]
    assert torch.equal(shown[1], frames[12])
    assert torch.equal(shown[2], shown[3]), "a last frame without partner is shown twice"
    # Grey levels by index, after H.264.
    assert abs(float(shown[2].float().mean()) - clips.grey(58)) < 4


def test_frames_are_decoded_for_the_text_encoder_where_the_rows_came_from_a_cache(decoded: list[int]) -> None:
    data = clips.video(clips.even(2.5, 24))
    pixels = ReferencePixels(resolved([data], "video", ["reference"]), 0, data)
    shown = pixels.shown((0, 12))
    again = pixels.shown((12, 0))
    assert decoded == [60]
    assert torch.equal(shown[0], again[1])
    assert torch.equal(shown[1], again[0])


def test_a_sound_is_cut_at_the_length_of_the_clip() -> None:
    data = clips.wav(clips.noise(6.0, 32_000, 1), 32_000)
    request = resolved([data], "audio", ["reference"])
    waveform = ReferencePixels(request, 0, data).sound()
    assert waveform.shape == (2, int(107 / 24 * 32_000))
    assert torch.equal(waveform[0], waveform[1])
