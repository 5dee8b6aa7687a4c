"""Planes made on a real GPU are those of the CPU, to the bit, and arrive by pinned copies. Needs torch and pytest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.colour import to_i420
from runtime.contract import COLOURS
from runtime.events import Cancellation
from runtime.mux import MediaOptions, Mp4Writer
from runtime.tail import encode_behind
from runtime.transfer import to_host

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")


def levels(frames: int, height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, frames, height, width), generator=torch.Generator().manual_seed(4)).float()


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("size", [(256, 288), (768, 1344)])
def test_a_gpu_gives_the_planes_of_the_cpu(colour: str, size: tuple[int, int]) -> None:
    rgb = levels(3, *size)
    assert torch.equal(to_i420(rgb.cuda(), colour).cpu(), to_i420(rgb, colour))


def test_chunks_arrive_whole_although_the_device_goes_on() -> None:
    chunks = []
    for seed in range(6):
        planes = torch.full((17, 384, 256), seed, dtype=torch.uint8, device="cuda")
        chunks.append(to_host(planes))
        # What follows in the stream may reuse the device's memory.
        planes.fill_(255)
    for seed, chunk in enumerate(chunks):
        assert (chunk() == seed).all()


def test_both_devices_give_the_same_file() -> None:
    rgb, waveform = levels(51, 256, 288), np.zeros((2, 68_000), np.float32)

    def file(device: str) -> bytes:
        pieces: list[bytes] = []
        writer = Mp4Writer(288, 256, 32_000, MediaOptions("veryfast", 128_000, 18), pieces.append)
        placed = rgb.to(device)
        parts = (to_host(to_i420(placed[:, start : start + 17], "bt709")) for start in range(0, 51, 17))
        encode_behind(parts, waveform, writer, Cancellation())
        return b"".join(pieces)

    assert file("cuda") == file("cpu")
