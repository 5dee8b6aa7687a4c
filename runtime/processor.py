"""The pixels that the vision tower reads: resized, normalised and cut into patches as Qwen3-VL's processors do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import interpolate

from plugins.dimensions import Processor

PIXEL_MAXIMUM = 255.0


def vision_patches(frames: Sequence[torch.Tensor], grid: tuple[int, int], processor: Processor) -> torch.Tensor:
    """Patches float32 [4n, 1536] of one picture, or of the frames of one temporal patch: uint8 [H, W, 3] each.

    grid: rows and columns of patches (see `runtime.geometry`), to which the frames are resized where their sides are
    others. Patches come in the order in which the tower merges them, squares of merge x merge, row by row; each holds
    channels, frames, rows, columns. Fewer frames than `temporal_patch` are made up by repeating the last one. On the
    frames' device, which must be the CPU where they have to be resized. Bit-equal to transformers'
    Qwen2VLImageProcessor and Qwen3VLVideoProcessor.
    """
    merge, patch, (rows, columns) = processor.merge, processor.patch, grid
    pixels = _resized(torch.stack([frame.permute(2, 0, 1) for frame in frames]), (rows * patch, columns * patch))
    values = _lengthened(_normalised(pixels, processor), processor.temporal_patch)
    cells = values.reshape(len(values), -1, rows // merge, merge, patch, columns // merge, merge, patch)
    return cells.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)


def _resized(pixels: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
    if tuple(pixels.shape[-2:]) == sides:
        return pixels
    # On uint8: the processors round the result before they normalise it, and this kernel's weights are integers.
    return interpolate(pixels, sides, mode="bicubic", align_corners=False, antialias=True)


def _normalised(pixels: torch.Tensor, processor: Processor) -> torch.Tensor:
    """Pixels of mean 0 and deviation 1: as transformers does it, the division by 255 is part of both numbers."""
    mean, std = (PIXEL_MAXIMUM * torch.tensor(each, device=pixels.device) for each in (processor.mean, processor.std))
    return pixels.float().sub(mean.view(3, 1, 1)).div_(std.view(3, 1, 1))


def _lengthened(values: torch.Tensor, frames: int) -> torch.Tensor:
    missing = frames - len(values)
    if missing and len(values) == 1:
        return values.expand(frames, -1, -1, -1)
    return torch.cat([values, values[-1:].expand(missing, -1, -1, -1)])
