"""The exchanges as TensorRT plugins, between two GPUs: enqueued with device pointers on a stream, and in a CUDA graph.

The plugins are made by TensorRT's own registry, its lean runtime's, as it makes them for a plan that is opened.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench.ranks import together
from plugins.kernels.open_group import open_group
from plugins.op import DOMAIN
from plugins.registry import find
from plugins.tensorrt_plugin import VERSION, Exchange, exchanging

RANKS = 2
LEAN = "tensorrt_lean_bindings"

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS,
        reason=f"torch finds {torch.cuda.device_count()} CUDA devices, {RANKS} exchange",
    ),
    pytest.mark.skipif(importlib.util.find_spec(LEAN) is None, reason=f"{LEAN} is not installed"),
]

ROWS, LOCAL, HEADS, CHANNELS = 500, 256, 56, 128


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(checks, RANKS, tmp_path_factory.mktemp("plugins"), limit=120)


@pytest.mark.parametrize("way", ["symmetric", "collective"])
@pytest.mark.parametrize("step", ["enqueued", "replayed"])
def test_plugins_exchange_rows_for_heads_and_back(found: list[dict[str, Any]], way: str, step: str) -> None:
    assert all(each[f"{way}, {step}"] for each in found)


def checks(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """What one rank finds."""
    import tensorrt_lean_bindings as trt

    assert dist.group.WORLD is not None
    seen = {}
    for way in ("symmetric", "collective"):
        chain = _Chain(trt, Exchange(open_group(dist.group.WORLD, device, way)), device)
        stream = torch.cuda.Stream()
        chain.draw(1, rank)
        torch.cuda.synchronize()
        chain.enqueue(stream)
        stream.synchronize()
        seen[f"{way}, enqueued"] = chain.right(rank)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            chain.enqueue(stream)
        right = True
        for seed in (2, 3):
            chain.draw(seed, rank)
            graph.replay()
            torch.cuda.synchronize()
            right &= chain.right(rank)
        seen[f"{way}, replayed"] = right
    return seen


class _Chain:
    """Both plugins, one behind the other, and the memory that TensorRT would give them."""

    def __init__(self, trt: Any, exchange: Exchange, device: torch.device) -> None:
        self._there, self._back = (
            _made(trt, name, exchange) for name in ("ulysses_all_to_all", "ulysses_all_to_all_back")
        )
        self._parts = [_empty(LOCAL, HEADS, device) for _ in range(3)]
        self._came = [_empty(ROWS, HEADS // RANKS, device) for _ in range(3)]
        self._returned = _empty(LOCAL, HEADS, device)
        self._sequence = torch.zeros(ROWS, dtype=torch.int64, device=device)
        self._every = _empty(0, HEADS, device)

    def draw(self, seed: int, rank: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        every = torch.randn(RANKS * LOCAL, HEADS, 3 * CHANNELS, device="cuda", generator=generator).bfloat16()
        for part, mine in zip(self._parts, every[LOCAL * rank :][:LOCAL].chunk(3, -1), strict=True):
            part.copy_(mine)
        self._every = every[:ROWS]

    def enqueue(self, stream: torch.cuda.Stream) -> None:
        _enqueue(self._there, [*self._parts, self._sequence], self._came, stream)
        _enqueue(self._back, [self._came[2], self._parts[0]], [self._returned], stream)

    def right(self, rank: int) -> bool:
        """Whether everything is where it belongs; clears it for the next time."""
        heads = slice(rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS)
        wanted = self._every[:, heads].chunk(3, -1)
        arrived = all(torch.equal(a, b) for a, b in zip(self._came, wanted, strict=True))
        mine = self._every[LOCAL * rank :][:LOCAL, :, 2 * CHANNELS :]
        count = len(mine)
        returned = torch.equal(self._returned[:count], mine) and not self._returned[count:].any()
        for memory in (*self._came, self._returned):
            memory.fill_(float("nan"))
        return arrived and returned


def _empty(rows: int, heads: int, device: torch.device) -> torch.Tensor:
    return torch.full((rows, heads, CHANNELS), float("nan"), dtype=torch.bfloat16, device=device)


def _made(trt: Any, name: str, exchange: Exchange) -> Any:
    registry = trt.get_plugin_registry()
    ranks = trt.PluginField("ranks", np.array([RANKS], np.int64), trt.PluginFieldType.INT64)
    with exchanging(trt, registry, [find(name)], exchange):
        creator = registry.get_creator(name, VERSION, DOMAIN)
        return creator.create_plugin(name, trt.PluginFieldCollection([ranks]), trt.TensorRTPhase.RUNTIME)


def _enqueue(plugin: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], stream: torch.cuda.Stream) -> None:
    described = [[_described(x) for x in tensors] for tensors in (inputs, outputs)]
    addresses = [[x.data_ptr() for x in tensors] for tensors in (inputs, outputs)]
    plugin.enqueue(*described, *addresses, 0, stream.cuda_stream)


def _described(x: torch.Tensor) -> SimpleNamespace:
    names = {torch.bfloat16: "BF16", torch.int64: "INT64"}
    return SimpleNamespace(dims=tuple(x.shape), type=SimpleNamespace(name=names[x.dtype]))
