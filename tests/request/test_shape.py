"""Frame and canvas arithmetic against the tables of the contract."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.shape import Shape, canvas, grid_frames, legal_frames
from tests.request.sizes import RELEASED

# Frames, latent frames, audio latents, rows at 1344x768 without text: the model's table of whole seconds 4 to 15.
TABLE = [
    (107, 32, 178, 32612),
    (124, 37, 207, 37710),
    (158, 47, 263, 47902),
    (175, 52, 292, 53000),
    (192, 57, 320, 58096),
    (226, 67, 377, 68290),
    (243, 72, 405, 73386),
    (277, 82, 462, 83580),
    (294, 87, 490, 88676),
    (328, 97, 547, 98870),
    (345, 102, 575, 103966),
    (362, 107, 603, 109062),
]


@pytest.mark.parametrize(("frames", "latent_frames", "audio_latents", "rows"), TABLE)
def test_the_table_of_lengths(frames: int, latent_frames: int, audio_latents: int, rows: int) -> None:
    shape = Shape.of(1344, 768, frames, RELEASED)
    found = shape.latent_frames, shape.audio_latents, shape.video_rows + shape.audio_rows
    assert found == (latent_frames, audio_latents, rows)


def test_sixteen_lengths_are_legal() -> None:
    lengths = legal_frames(RELEASED.video_vae)
    assert (lengths[0], lengths[-1], len(lengths)) == (107, 362, 16)


@settings(deadline=None)
@given(st.integers(5, 10_000))
def test_the_grid_is_the_next_17n_plus_5(frames: int) -> None:
    expected = next(candidate for candidate in range(frames, frames + 17) if candidate % 17 == 5)
    assert grid_frames(frames, RELEASED.video_vae) == expected


@pytest.mark.parametrize(
    ("ratio", "sides"),
    [
        ("21:9", (1536, 672)),
        ("16:9", (1344, 768)),
        ("4:3", (1024, 768)),
        ("1:1", (768, 768)),
        ("3:4", (768, 1024)),
        ("9:16", (768, 1344)),
        ("4:1", (2016, 512)),
    ],
)
def test_the_table_of_canvases(ratio: str, sides: tuple[int, int]) -> None:
    assert canvas(ratio) == sides
