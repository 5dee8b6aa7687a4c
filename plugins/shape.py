"""Arithmetic of frames and canvases: the 17n + 5 grid, the latents of both streams, the canvas of an aspect ratio.

Every `round` is Python's, half to even, as in the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

from plugins.dimensions import (
    AUDIO_CHANNELS,
    AUDIO_LATENTS_PER_SECOND,
    FRAMES_PER_SECOND,
    Dimensions,
    VideoVAEDimensions,
)

SECONDS_MINIMUM, SECONDS_MAXIMUM = 4, 15
"""Durations that a clip may be asked for with."""

SIDE_MULTIPLE = 32
"""Pixels of a VAE cell times a patch: what both sides of a canvas are multiples of."""

ASPECT_RATIOS = ("21:9", "16:9", "4:3", "1:1", "3:4", "9:16")

SHORT_EDGE = 768
CANVAS_AREA = 768 * 1344
"""The canvas of a named ratio has this short edge and at most this many pixels."""


@dataclass(frozen=True)
class Shape:
    """A clip's sizes: pixels and frames, and the latents and packed rows that follow from them."""

    width: int
    height: int
    frames: int
    latent_frames: int
    latent_height: int
    latent_width: int
    audio_latents: int
    video_rows: int
    audio_rows: int

    @staticmethod
    def of(width: int, height: int, frames: int, dimensions: Dimensions) -> Shape:
        """The shape of a clip whose frame count lies on the grid and whose sides are multiples of 32."""
        cell = dimensions.video_vae.spatial_ratio
        patch_frames, patch_height, patch_width = dimensions.denoiser.patch
        latent_frames, latent_height, latent_width = (
            latents(frames, dimensions.video_vae),
            height // cell,
            width // cell,
        )
        audio_latents = round(frames / FRAMES_PER_SECOND * AUDIO_LATENTS_PER_SECOND)
        patches = (latent_height // patch_height) * (latent_width // patch_width)
        return Shape(
            width,
            height,
            frames,
            latent_frames,
            latent_height,
            latent_width,
            audio_latents,
            video_rows=latent_frames // patch_frames * patches,
            audio_rows=AUDIO_CHANNELS * audio_latents,
        )


def grid_frames(frames: int, vae: VideoVAEDimensions) -> int:
    """The smallest 17n + 5 that is at least `frames`."""
    clips = -((vae.frame_overlap - frames) // vae.clip_frames)
    return clips * vae.clip_frames + vae.frame_overlap


def floor_grid_frames(frames: int, vae: VideoVAEDimensions) -> int:
    """The largest 17n + 5 with at least one whole clip that is at most `frames`; below 22 there is none: ValueError."""
    clips = (frames - vae.frame_overlap) // vae.clip_frames
    if clips < 1:
        raise ValueError(f"frames: {frames} is below {vae.clip_frames + vae.frame_overlap}, the shortest clip")
    return clips * vae.clip_frames + vae.frame_overlap


def latents(frames: int, vae: VideoVAEDimensions) -> int:
    """Latent frames 5n + 2 of 17n + 5 frames."""
    clips = (frames - vae.frame_overlap) // vae.clip_frames
    return clips * vae.clip_latents + vae.token_overlap


def requested_frames(seconds: float) -> int:
    """Frames of a duration, before the grid."""
    return round(seconds * FRAMES_PER_SECOND)


def legal_frames(vae: VideoVAEDimensions) -> tuple[int, ...]:
    """Every frame count that a request can resolve to (107 to 362), shortest first."""
    first = grid_frames(requested_frames(SECONDS_MINIMUM), vae)
    last = grid_frames(requested_frames(SECONDS_MAXIMUM), vae)
    return tuple(range(first, last + 1, vae.clip_frames))


def canvas(aspect_ratio: str) -> tuple[int, int]:
    """(width, height) of a named ratio."""
    return canvas_of(ratio_of(aspect_ratio))


def canvas_of(ratio: float, short_edge: int = SHORT_EDGE) -> tuple[int, int]:
    """(width, height) of a width over height: its short edge, at most 768 x 1344 pixels, sides to the nearest 32.

    Equal to diffusers' resolve_canvas_size, operation by operation: a side half way between two multiples of 32 goes
    where the last bit of these products sends it.
    """
    width, height = short_edge * max(ratio, 1.0), short_edge / min(ratio, 1.0)
    scale = min(1.0, (CANVAS_AREA / (width * height)) ** 0.5)
    return nearest_side(width * scale), nearest_side(height * scale)


def ratio_of(name: str) -> float:
    """Width over height of a named ratio such as 16:9."""
    width, height = name.split(":")
    return int(width) / int(height)


def nearest_side(pixels: float) -> int:
    """The multiple of 32 nearest to a side, at least 32."""
    return max(SIDE_MULTIPLE, round(pixels / SIDE_MULTIPLE) * SIDE_MULTIPLE)
