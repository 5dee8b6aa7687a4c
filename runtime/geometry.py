"""Sizes of keyframes and references: pixels, frames, latents and vision patches that follow from a file's facts.

Integers and Python's own float64 only; every `round` is half to even, as in the reference (spec/model.md 3.5 and 7.2).
That a picture's sides and ratio are legal is checked where the file is probed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from plugins.dimensions import FRAMES_PER_SECOND, AudioVAEDimensions, Processor, VideoVAEDimensions
from plugins.shape import canvas_of, floor_grid_frames, nearest_side

KeyframeGeometry = Literal["diffusers", "vllm-omni"]
"""How keyframes are put on the canvas. diffusers: the first is stretched, a second covers it and is cropped.
vllm-omni: each is stretched."""

Size = tuple[int, int]
Grid = tuple[int, int, int]

CONDITIONER_FRAMES_PER_SECOND = 2
"""Rate at which the vision tower sees a reference video."""

_SIDE_RATIO_MAXIMUM = 200


@dataclass(frozen=True)
class Placement:
    """How a picture is put on a canvas: resized to `size` (width, height), then cut at (left, top) to the canvas."""

    size: Size
    left: int = 0
    top: int = 0


def keyframe_placement(index: int, size: Size, canvas: Size, geometry: KeyframeGeometry) -> Placement:
    """How keyframe `index` (0 or 1, in packed order) of these sides is put on the canvas.

    The covering one keeps its ratio: the larger of the two scales, sides rounded, the middle kept.
    """
    if index == 0 or geometry == "vllm-omni":
        return Placement(canvas)
    scale = max(canvas[0] / size[0], canvas[1] / size[1])
    width, height = (max(target, round(side * scale)) for target, side in zip(canvas, size, strict=True))
    return Placement((width, height), (width - canvas[0]) // 2, (height - canvas[1]) // 2)


def image_size(width: int, height: int, short_edge: int) -> Size:
    """(width, height) of a reference image: its short edge made `short_edge`, up or down, sides to the nearest 32."""
    scale = short_edge / min(width, height)
    return nearest_side(width * scale), nearest_side(height * scale)


def video_size(width: int, height: int, short_edge: int) -> Size:
    """(width, height) of a reference video: the canvas of its own ratio, with that short edge."""
    return canvas_of(width / height, short_edge)


def video_frames(available: int, target_frames: int, vae: VideoVAEDimensions) -> int:
    """Frames of a reference video that the VAE sees: cut at the clip's own length, then down to 17n + 5.

    available: its frames at 24 a second. Raises ValueError when fewer than 22 are left.
    """
    return floor_grid_frames(min(available, target_frames), vae)


def conditioner_frames(frames: int, processor: Processor) -> tuple[list[int], list[float]]:
    """What the vision tower sees of a video of `frames` frames at 24 a second, once it is cut at the clip's length.

    Returns the indices of its frames at 2 a second, and the time in seconds that labels each group of `temporal_patch`
    of them: the mean over the group's ends, a last frame without partner counting twice. Equal to diffusers'
    _sample_video_condition_frames. Raises ValueError when there are not enough frames for one group.
    """
    stride = FRAMES_PER_SECOND // CONDITIONER_FRAMES_PER_SECOND
    indices = list(range(0, frames, stride))
    shortest = (processor.temporal_patch - 1) * stride + 1
    if frames < shortest:
        raise ValueError(f"frames: {frames} is below {shortest}, the shortest video that the text encoder can see")
    groups = frame_groups(range(len(indices)), processor)
    return indices, [(group[0] + group[-1]) / CONDITIONER_FRAMES_PER_SECOND / 2 for group in groups]


def frame_groups(indices: Sequence[int], processor: Processor) -> list[tuple[int, ...]]:
    """Consecutive frames in groups of `temporal_patch`; the last frame is repeated where one is incomplete."""
    length = processor.temporal_patch
    padded = [*indices, *[indices[-1]] * (-len(indices) % length)]
    return [tuple(padded[start : start + length]) for start in range(0, len(padded), length)]


def smart_resize_image(height: int, width: int, processor: Processor) -> Size:
    """(height, width) at which the vision tower sees an image: equal to transformers' qwen2_vl smart_resize."""
    return _smart_resize(1, 1, height, width, processor.factor, processor.image_min_pixels, processor.image_max_pixels)


def smart_resize_video(frames: int, height: int, width: int, processor: Processor) -> Size:
    """(height, width) at which the vision tower sees `frames` sampled frames: transformers' qwen3_vl smart_resize.

    Their number before the last is repeated counts. Raises ValueError when there are fewer than `temporal_patch`.
    """
    if frames < processor.temporal_patch:
        raise ValueError(f"frames: {frames} is below {processor.temporal_patch}, the frames of one patch")
    if min(height, width) < processor.factor:
        scale = max(processor.factor / height, processor.factor / width)
        height, width = int(height * scale), int(width * scale)
    counted = round(frames / processor.temporal_patch) * processor.temporal_patch
    limits = processor.video_min_pixels, processor.video_max_pixels
    return _smart_resize(frames, counted, height, width, processor.factor, *limits)


def image_grid(width: int, height: int, processor: Processor) -> Grid:
    """Patches (1, rows, columns) of an image of these sides, after the resize for the vision tower."""
    return _grid(1, smart_resize_image(height, width, processor), processor)


def video_grid(frames: int, width: int, height: int, processor: Processor) -> Grid:
    """Patches (groups, rows, columns) of a video of `frames` frames at 24 a second and these sides."""
    indices, times = conditioner_frames(frames, processor)
    return _grid(len(times), smart_resize_video(len(indices), height, width, processor), processor)


def vision_tokens(grid: Grid, processor: Processor) -> int:
    """Rows of the text encoder that one vision block of a grid takes: one of merge x merge patches, one group."""
    return grid[1] * grid[2] // processor.merge**2


def sound_samples(samples: int, rate: int, seconds: float, vae: AudioVAEDimensions) -> int:
    """Samples of a sound at the VAE's rate: cut at `seconds`, then resampled.

    Equal to the length that torchaudio's Resample makes, which rounds it to float32 before it rounds it up.
    """
    cut = min(samples, int(seconds * rate))
    if rate == vae.sample_rate:
        return cut
    divisor = math.gcd(rate, vae.sample_rate)
    return math.ceil(np.float32(vae.sample_rate // divisor * cut / (rate // divisor)))


def sound_latents(samples: int, rate: int, seconds: float, vae: AudioVAEDimensions) -> int:
    """Audio latents of one channel of a sound of `samples` samples at `rate`, cut at `seconds`: the last padded."""
    return -(-sound_samples(samples, rate, seconds, vae) // vae.hop)


def _grid(groups: int, sides: Size, processor: Processor) -> Grid:
    height, width = sides
    return groups, height // processor.patch, width // processor.patch


def _smart_resize(frames: int, counted: int, height: int, width: int, factor: int, minimum: int, maximum: int) -> Size:
    """Sides as multiples of `factor` so that counted * height * width lies within the limits, the ratio about kept."""
    if max(height, width) / min(height, width) > _SIDE_RATIO_MAXIMUM:
        raise ValueError(f"size: {width}x{height}; one side must be at most {_SIDE_RATIO_MAXIMUM} times the other")
    rounded = round(height / factor) * factor, round(width / factor) * factor
    pixels = counted * rounded[0] * rounded[1]
    if pixels > maximum:
        beta = math.sqrt((frames * height * width) / maximum)
        return _fewer(height / beta, factor), _fewer(width / beta, factor)
    if pixels < minimum:
        beta = math.sqrt(minimum / (frames * height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return rounded


def _fewer(side: float, factor: int) -> int:
    return max(factor, math.floor(side / factor) * factor)
