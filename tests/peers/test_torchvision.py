"""Patches against transformers' own image and video processors on torchvision, as a checkpoint's users run them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import geometry
from runtime.processor import vision_patches
from tests.request.sizes import RELEASED

PROCESSOR = RELEASED.processor
PROGRAM = Path(__file__).with_name("torchvision_patches.py")

# On the grid, off it, below the least pixels, above the most (with the limits below), a sliver.
IMAGES = [(256, 352), (300, 411), (250, 250), (64, 80), (37, 91), (640, 900), (1500, 33)]
# Frames too: one without partner, and more pixels than the limit.
VIDEOS = [(2, 64, 96), (5, 300, 411), (4, 40, 33), (7, 256, 352)]
IMAGE_PIXELS, VIDEO_PIXELS = 400_000, 300_000


@pytest.fixture(scope="module")
def pixels():
    generator = np.random.default_rng(5)
    shapes = [(*shape, 3) for shape in (*IMAGES, *VIDEOS)]
    return {str(shape[:-1]): generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes}


@pytest.fixture(scope="module")
def theirs(pixels, torchvision_wheel, tmp_path_factory):
    directory = tmp_path_factory.mktemp("torchvision")
    np.savez(directory / "pictures.npz", **pixels)
    shared = {"patch_size": 16, "image_mean": PROCESSOR.mean, "image_std": PROCESSOR.std}
    limits = {
        "images": {"size": {"shortest_edge": PROCESSOR.image_min_pixels, "longest_edge": IMAGE_PIXELS}, **shared},
        "videos": {"size": {"shortest_edge": PROCESSOR.video_min_pixels, "longest_edge": VIDEO_PIXELS}, **shared},
    }
    files = [str(directory / name) for name in ("pictures.npz", "patches.npz")]
    command = [sys.executable, str(PROGRAM), str(torchvision_wheel), *files, json.dumps(limits)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return dict(np.load(files[1]))


def bounded():
    return PROCESSOR.model_copy(update={"image_max_pixels": IMAGE_PIXELS, "video_max_pixels": VIDEO_PIXELS})


@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_patches_of_an_image_are_bit_equal(theirs, pixels, shape):
    grid = geometry.image_grid(shape[1], shape[0], bounded())
    found = vision_patches([torch.from_numpy(pixels[str(shape)])], grid[1:], bounded())
    assert grid == tuple(theirs[f"{shape} grid"])
    assert torch.equal(found, torch.from_numpy(theirs[str(shape)]))


@pytest.mark.parametrize("shape", VIDEOS, ids=str)
def test_patches_of_a_video_are_bit_equal(theirs, pixels, shape):
    frames = torch.from_numpy(pixels[str(shape)])
    height, width = geometry.smart_resize_video(*shape, bounded())
    groups = geometry.frame_groups(range(shape[0]), bounded())
    found = [
        vision_patches([frames[frame] for frame in group], (height // 16, width // 16), bounded()) for group in groups
    ]
    assert (len(groups), height // 16, width // 16) == tuple(theirs[f"{shape} grid"])
    assert torch.equal(torch.cat(found), torch.from_numpy(theirs[str(shape)]))
