"""What encoding the references of a request takes of memory: pixels, tiles of the VAE, the vision tower, sounds.

Counts of arrays alive at the same time, as in `admission`. References are encoded one after another, a clip of 17
frames at a time; frames that the vision tower will see are kept, and so is what it made of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plugins.dimensions import AUDIO_CHANNELS, Dimensions
from runtime.geometry import conditioner_frames
from runtime.media.facts import ImageFacts, VideoFacts
from runtime.references import Reference, Target, condition_rows, reference
from runtime.request import Resolved

FLOAT = 4

SOURCE_PIXEL_BYTES = 16
"""A pixel of a source picture: decoded as RGB and RGBA, turned upright, and the frame that FFmpeg holds."""

PICTURE_PIXEL_BYTES = 9
"""A pixel of a picture that is being fitted: RGB three times, in Pillow, as an array, and in the clip."""

PATCH_COPIES = 3
"""Arrays of all pixels of one picture as float32 on the way to patches."""

TILE_ARRAYS = 6
"""Arrays [widest at full resolution, frames, 256, 256] of a video encoder tile."""

SOUND_ARRAYS = 6
"""Arrays [widest at full rate, samples] of the audio encoder, for both channels."""

VISION_HIDDEN, VISION_ATTENTION, VISION_FEED_FORWARD = 5, 9, 3
"""Arrays [patches, .] of a vision block, whose attention streams over rows as the denoiser's does."""


@dataclass(frozen=True)
class Conditions:
    """What memory depends on of a request's references, all zero without.

    video_rows, audio_rows: packed rows. patches: of the largest picture that the vision tower sees. vision_rows: rows
    of the text encoder that show pictures. frames: that a tile holds, 17 or 1. source, fitted: pixels of the largest
    picture, as it is in its file and as the VAE sees it. kept: pixels of all frames for the vision tower. samples: of
    one channel of the longest sound.
    """

    video_rows: int = 0
    audio_rows: int = 0
    patches: int = 0
    vision_rows: int = 0
    frames: int = 0
    source: int = 0
    fitted: int = 0
    kept: int = 0
    samples: int = 0

    @staticmethod
    def of(references: Sequence[Reference], dimensions: Dimensions) -> Conditions:
        """The conditions that some references are."""
        video_rows, audio_rows = condition_rows(references, dimensions)
        vae, merged = dimensions.video_vae, dimensions.vision.merged
        grids = [one.vision_grid for one in references]
        return Conditions(
            video_rows,
            audio_rows,
            patches=max((grid[1] * grid[2] for grid in grids), default=0),
            vision_rows=sum(grid[0] * grid[1] * grid[2] // merged for grid in grids),
            frames=max((min(one.encoded_frames, vae.clip_frames) for one in references), default=0),
            source=max(map(_source_pixels, references), default=0),
            fitted=max((one.width * one.height * min(one.frames, vae.clip_frames) for one in references), default=0),
            kept=sum(one.width * one.height * _shown_frames(one, dimensions) for one in references),
            samples=max((one.audio_latents * dimensions.audio_vae.hop for one in references), default=0),
        )


@dataclass(frozen=True)
class EncoderSizes:
    """Channels at full resolution of the video VAE's encoder, and at full rate of the audio VAE's."""

    tile_features: int = 0
    sound_features: int = 0


NO_CONDITIONS, NO_ENCODERS = Conditions(), EncoderSizes()


def reencoded(resolved: Resolved, image_edge: int, dimensions: Dimensions) -> tuple[Reference, ...]:
    """The references of a request with another short edge of its images."""
    edges = image_edge, resolved.video_reference_short_edge
    target = Target(resolved.width, resolved.height, resolved.frames, *edges)
    return tuple(reference(one.known(""), one.role, target, dimensions) for one in resolved.references)


def encoding_bytes(conditions: Conditions, encoders: EncoderSizes, dimensions: Dimensions) -> int:
    """Bytes at the height of encoding the references, the text encoder apart."""
    tower, vae = dimensions.vision, dimensions.video_vae
    pixels = SOURCE_PIXEL_BYTES * conditions.source + PICTURE_PIXEL_BYTES * conditions.fitted
    tile = TILE_ARRAYS * encoders.tile_features * conditions.frames * vae.tile**2
    sound = SOUND_ARRAYS * encoders.sound_features * AUDIO_CHANNELS * conditions.samples
    wide = max(VISION_ATTENTION * tower.hidden, VISION_FEED_FORWARD * tower.intermediate)
    vision = conditions.patches * (PATCH_COPIES * tower.patch_features + VISION_HIDDEN * tower.hidden + wide)
    return pixels + 3 * conditions.kept + FLOAT * max(tile, sound, vision)


def held_bytes(conditions: Conditions, dimensions: Dimensions) -> int:
    """Bytes of condition rows, and of what the vision tower made, while the text encoder runs."""
    denoiser = dimensions.denoiser
    rows = conditions.video_rows * denoiser.video_row + conditions.audio_rows * denoiser.audio_channels
    return FLOAT * (
        rows + (1 + len(dimensions.vision.deepstack)) * conditions.vision_rows * dimensions.text_encoder.hidden
    )


def _source_pixels(one: Reference) -> int:
    return one.facts.width * one.facts.height if isinstance(one.facts, ImageFacts | VideoFacts) else 0


def _shown_frames(one: Reference, dimensions: Dimensions) -> int:
    if one.kind != "video":
        return one.frames
    return len(conditioner_frames(one.frames, dimensions.processor)[0])
