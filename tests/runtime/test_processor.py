"""Patches against transformers' own image and video processors, as far as they load without torchvision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from runtime import geometry
from runtime.processor import vision_patches
from tests.request.sizes import RELEASED

PROCESSOR = RELEASED.processor
LIMITS = {"shortest_edge": PROCESSOR.image_min_pixels, "longest_edge": PROCESSOR.image_max_pixels}

# One level of 255 after normalisation: (1 / 255) / 0.5.
LEVEL = 2 / 255

multiples = st.integers(8, 20).map(lambda n: 32 * n)


def picture(height, width, seed):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def photograph(height, width):
    """A smooth picture, as photographs are: resampling kernels that agree on it agree on what matters."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 9 + 0.01 * y), np.cos(y / 13), np.sin((x + y) / 21)]
    return np.stack([(127.5 + 120 * wave).round() for wave in waves], axis=-1).astype(np.uint8)


def theirs(image):
    processor = Qwen2VLImageProcessorPil(patch_size=16, size=LIMITS, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    found = processor(images=[image], return_tensors="pt")
    return found["pixel_values"], tuple(found["image_grid_thw"][0].tolist())


def ours(image):
    grid = geometry.image_grid(image.shape[1], image.shape[0], PROCESSOR)
    return vision_patches([torch.from_numpy(image)], grid[1:], PROCESSOR), grid


@settings(max_examples=25, deadline=None)
@given(multiples, multiples, st.integers(0, 2**32))
def test_a_picture_on_the_grid_gives_the_patches_of_transformers(height, width, seed):
    image = picture(height, width, seed)
    (expected, expected_grid), (found, grid) = theirs(image), ours(image)
    assert grid == expected_grid
    assert found.dtype == torch.float32
    assert found.shape == (grid[1] * grid[2], 1536)
    # The numpy backend divides by 255 first: values within [-1, 1], two roundings apart.
    assert (found - expected).abs().max() <= 2.0**-22


@pytest.mark.parametrize(("height", "width"), [(300, 411), (257, 640), (250, 250), (900, 500), (64, 80)])
def test_a_picture_off_the_grid_is_resized_as_by_transformers(height, width):
    image = photograph(height, width)
    (expected, expected_grid), (found, grid) = theirs(image), ours(image)
    assert grid == expected_grid
    # Pillow and torch round the weights of the same kernel to integers of other sizes, and each of the two passes
    # rounds to a level: a level apart after each, seldom. tests/peers compares with the kernel itself.
    difference = (found - expected).abs()
    assert difference.max() <= 2.01 * LEVEL
    assert difference.mean() <= 0.1 * LEVEL


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 7), st.integers(1, 4).map(lambda n: 32 * n), st.integers(1, 4).map(lambda n: 32 * n))
def test_a_video_gives_the_patches_of_transformers_video_processor(frames, height, width):
    video = np.stack([picture(height, width, seed) for seed in range(frames)])
    # Its own arithmetic after the resize, which needs torchvision: normalisation as it writes it down, then patchify.
    mean = std = torch.tensor([0.5] * 3).view(3, 1, 1) * (1.0 / (1 / 255))
    pixels = (torch.from_numpy(video).permute(0, 3, 1, 2).to(torch.float32) - mean) / std
    expected, *grid = Qwen3VLVideoProcessor.patchify(None, pixels[None], 16, 2, 2)
    groups = geometry.frame_groups(range(frames), PROCESSOR)
    found = [
        vision_patches([torch.from_numpy(video[frame]) for frame in group], (height // 16, width // 16), PROCESSOR)
        for group in groups
    ]
    assert [len(groups), height // 16, width // 16] == grid
    assert torch.equal(torch.cat(found), expected[0])


def test_a_single_picture_is_its_own_second_frame():
    frame = torch.from_numpy(picture(64, 96, 1))
    twice = vision_patches([frame, frame], (4, 6), PROCESSOR)
    assert torch.equal(vision_patches([frame], (4, 6), PROCESSOR), twice)
    assert twice.is_contiguous()
