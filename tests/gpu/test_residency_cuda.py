"""Streaming weights on a real GPU. Needs torch, numpy, pydantic and pytest alone, so that it runs on any GPU host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engines.sessions.gpu import CudaGpu
from engines.sessions.residency import DeviceWeights, HostWeights, Staging, spread
from engines.sessions.weights import ALIGNMENT, MappedWeights, PackedUnits, WeightName
from engines.store import Region, WeightFile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")

UNITS, SIDE = 7, 1024
NBYTES = 2 * SIDE * SIDE
MATRIX, VECTOR = WeightName("block", "matrix"), WeightName("block", "vector")


@pytest.fixture(scope="module")
def matrices() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(UNITS, SIDE, SIDE, generator=generator) / SIDE**0.5).bfloat16()


@pytest.fixture(scope="module")
def units(matrices: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> PackedUnits:
    """Each unit is a matrix and three odd bytes, at odd places of a file."""
    file: Path = tmp_path_factory.mktemp("weights") / "weights"
    file.write_bytes(b"".join(b"abc" + m.view(torch.uint8).numpy().tobytes() for m in matrices))
    starts = [i * (NBYTES + 3) for i in range(UNITS)]
    mapped = MappedWeights([WeightFile(path=str(file), size=file.stat().st_size, header_sha256="")])
    layout = [
        {VECTOR: (Region(0, start, (3,)), 3), MATRIX: (Region(0, start + 3, (SIDE, SIDE)), NBYTES)} for start in starts
    ]
    return PackedUnits(mapped, layout)


@pytest.fixture
def gpu() -> CudaGpu:
    return CudaGpu(torch.device("cuda", 0))


def weights(gpu: CudaGpu, units: PackedUnits, resident: int, kept: int) -> DeviceWeights:
    host = HostWeights(gpu, units, Staging(gpu, max(units.sizes)), range(kept))
    return DeviceWeights(gpu, host, spread(resident, UNITS))


def matrix(memory: torch.Tensor, units: PackedUnits, unit: int) -> torch.Tensor:
    start = units.offsets[unit][MATRIX]
    assert (memory.data_ptr() + start) % ALIGNMENT == 0
    return memory[start : start + NBYTES].view(torch.bfloat16).view(SIDE, SIDE)


@pytest.mark.parametrize("resident", [0, 3, UNITS])
@pytest.mark.parametrize("kept", [0, UNITS])
def test_every_product_is_with_its_own_matrix(
    gpu: CudaGpu, units: PackedUnits, matrices: torch.Tensor, resident: int, kept: int
) -> None:
    held, steps = weights(gpu, units, resident, kept), 4
    x = torch.randn(256, SIDE, generator=torch.Generator().manual_seed(2)).bfloat16().to(gpu.device)
    found = []
    for step in range(steps):
        for unit in range(UNITS):
            with gpu.computing():
                memory = held.acquire(unit)
                # Long enough for the copies of units to come to be ahead, were they not held back.
                torch.cuda._sleep(2_000_000)
                found.append(x @ matrix(memory, units, unit))
                held.release(unit)
        if step == 1:
            held.free(resident=True)
    on_device = matrices.to(gpu.device)
    for index, product in enumerate(found):
        # The same kernel on the same numbers.
        assert torch.equal(product, x @ on_device[index % UNITS]), (index // UNITS, index % UNITS)


def test_the_next_unit_arrives_while_the_device_computes(gpu: CudaGpu, units: PackedUnits) -> None:
    held = weights(gpu, units, 0, UNITS)
    for unit in range(2):
        with gpu.computing():
            held.acquire(unit)
            held.release(unit)
    torch.cuda.synchronize()
    with gpu.computing():
        held.acquire(2)
        torch.cuda._sleep(2_000_000_000)  # a second or so
        held.release(2)
        done = gpu.computed()
    arriving = next(slot for slot in held._slots if slot.unit == 3)
    gpu.finish(arriving.copied)
    assert not done.query(), "unit 3 is there, and unit 2 still computes"
    gpu.finish(done)


def test_callers_streams_and_ours_wait_for_each_other(gpu: CudaGpu) -> None:
    x = torch.zeros(1 << 20, device=gpu.device)
    torch.cuda._sleep(100_000_000)
    x += 1
    with gpu.computing():
        y = x * 2
        torch.cuda._sleep(100_000_000)
        y += 1
    assert (y + x).cpu().unique().tolist() == [4.0]


def test_pinned_memory_is_of_the_asked_size_and_is_let_go(gpu: CudaGpu) -> None:
    memory = gpu.pin(3 * (1 << 20) + 5)
    assert memory.is_pinned()
    assert memory.untyped_storage().nbytes() == 3 * (1 << 20) + 5
    memory.numpy()[:] = np.arange(len(memory)) % 251
    there = gpu.allocate(len(memory))
    gpu.finish(gpu.copy(there, memory, gpu.computed()))
    assert torch.equal(there.cpu(), memory)
    storage = memory.untyped_storage()
    del memory
    assert not torch.empty(0, dtype=torch.uint8).set_(storage).is_pinned()


def test_memory_is_given_back_after_a_stage(gpu: CudaGpu, units: PackedUnits) -> None:
    gpu.trim()
    before = torch.cuda.memory_reserved(gpu.device)
    held = weights(gpu, units, UNITS, 0)
    with gpu.computing():
        for unit in range(UNITS):
            held.acquire(unit)
            held.release(unit)
    assert torch.cuda.memory_allocated(gpu.device) >= UNITS * NBYTES
    held.free(resident=True)
    gpu.trim()
    assert torch.cuda.memory_reserved(gpu.device) <= before
