"""One transformer block: compiled with bound weights, in bfloat16 and with FP8 linears, beside diffusers' block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench import host, peer
from bench.measuring import Timing, in_turns, kernels
from bench.synthetic import (
    DEVICE,
    PARTITION,
    RandomWeights,
    Wanted,
    compile_packages,
    draw_input,
    graphs,
    open_engines,
    package,
    synthetic_store,
)
from engines.profile import Profile
from engines.sessions.engine_set import EngineSet
from engines.sessions.inductor import open_package
from export.binding import bind
from export.checkpoint import Checkpoint
from export.graphs.block import TABLE_ROWS
from export.graphs.block import graphs as block_graphs
from export.trace import BoundModule
from plugins.dimensions import DenoiserDimensions
from plugins.kernels import flash_attention_3

SIDES: dict[str, tuple[str, Literal["dense", "sage"]]] = {
    "bfloat16": ("h200_inductor", "dense"),
    "SAGE": ("h200_inductor", "sage"),
    "fp8 linears": ("h200_inductor_fp8", "dense"),
    "SAGE, fp8 linears": ("h200_inductor_fp8", "sage"),
}
"""Shipped profiles, and the attention that takes the place of theirs."""

GRAPHS = ("block",)

BAKED = "bfloat16, weights in the package"

PEER = "diffusers, torch.compile, cuDNN"

ROWS = 58_880
LARGEST_ROWS = 110_592

REST = 0.3
"""Seconds before each run of the second measurement and of the kernels', in which the GPU's power is no limit."""

BLOCK_ROUNDS = 15
"""Sides of a few percent's difference follow each other in that many orders."""

CHECKED_ROWS = 2048
"""Rows that float32 attention holds the scores of."""


def measure(folder: Path, rows: int = ROWS, largest: int = LARGEST_ROWS) -> dict[str, Any]:
    """Milliseconds of a block on each side, the kernels behind them, and the largest sequence."""
    compile_packages(folder, packages())
    engines = {name: open_block(folder, *side) for name, side in SIDES.items()}
    dimensions = engines["bfloat16"].manifest.dimensions.denoiser
    ours = {name: caller(each, rows) for name, each in engines.items()}
    ours[BAKED] = baked_caller(folder, engines["bfloat16"], rows)
    theirs = {
        PEER: peer.block(dimensions, rows, compiled=True),
        "diffusers, eager": peer.block(dimensions, rows, compiled=False),
    }
    timings, rested = (in_turns({**ours, **theirs}, BLOCK_ROUNDS, rest) for rest in (0.0, REST))
    sides = {**ours, PEER: theirs[PEER]}
    seen = {name: kernels(run, REST) for name, run in sides.items()}
    work = operations(dimensions, rows)
    result = {
        "what": f"one block, {rows} rows, random data",
        "host": host.describe(),
        "rows": rows,
        "operations": work,
        "sides": _beside_peer(timings, sum(work.values())),
        "sides after a rest": _beside_peer(rested, sum(work.values())),
        "kernels": seen,
        "FlashAttention-3": flash_attention_3.available(),
        "error": {name: errors(folder, engines[name]) for name in ("bfloat16", "SAGE")},
        "difference from eager torch": {name: _difference(folder, engines[name], *SIDES[name]) for name in SIDES},
    }
    del theirs, ours, sides
    torch.cuda.empty_cache()
    long = in_turns({name: caller(each, largest) for name, each in engines.items()})
    result["largest"] = {"rows": largest, "sides": {name: t.as_json() for name, t in long.items()}}
    return result


def _beside_peer(timings: Mapping[str, Timing], work: float) -> dict[str, Any]:
    baseline = timings[PEER].median
    return {
        name: {**t.as_json(), "of_peer": t.median / baseline, "tflops": work / t.median / 1e9}
        for name, t in timings.items()
    }


def errors(folder: Path, engines: EngineSet, rows: int = CHECKED_ROWS) -> dict[str, float]:
    """Length of the difference to float32 over its length: of the compiled block, and of torch's eager one."""
    checkpoint = Checkpoint.open(folder / "checkpoint")
    inputs, stored = block_inputs(engines, rows), _stored(engines)
    found = engines.run("block", inputs, 0, PARTITION)["hidden_out"]
    wide = tuple(x.float() if x.is_floating_point() else x for x in inputs.values())
    exact = _eager(checkpoint, torch.float32, wide, stored)
    eager = _eager(checkpoint, torch.bfloat16, tuple(inputs.values()), stored)
    return {name: _error(each, exact) for name, each in {"compiled": found, "eager": eager}.items()}


def _difference(
    folder: Path, engines: EngineSet, name: str, blocks: Literal["dense", "sage"], rows: int = CHECKED_ROWS
) -> float:
    """Of a side's compiled block from the same graph run by eager torch, over the length of that."""
    (graph,) = graphs(Wanted(side_profile(name, blocks), GRAPHS), folder)
    inputs, stored = block_inputs(engines, rows), _stored(engines)
    found = engines.run("block", inputs, 0, PARTITION)["hidden_out"]
    with torch.no_grad():
        return _error(found, BoundModule(graph, bind(graph))(tuple(inputs.values()), stored))


def _stored(engines: EngineSet) -> tuple[torch.Tensor, ...]:
    """The first block's weights, drawn as they were for the engines."""
    with RandomWeights(engines.manifest, GRAPHS).tensors("block", 0, PARTITION) as drawn:
        return tuple(drawn[spec.name] for spec in engines.manifest.graphs["block"].weights)


def _eager(
    checkpoint: Checkpoint, compute: torch.dtype, inputs: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    (graph,) = block_graphs(checkpoint, PARTITION, compute)
    with torch.no_grad():
        result = BoundModule(graph, bind(graph))(inputs, weights)
    assert isinstance(result, torch.Tensor)
    return result


def _error(found: torch.Tensor, exact: object) -> float:
    assert isinstance(exact, torch.Tensor)
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def packages() -> tuple[Wanted, ...]:
    """The packages that the bench measures."""
    bound = tuple(Wanted(side_profile(*side), GRAPHS) for side in SIDES.values())
    return *bound, replace(bound[0], baked=True)


def open_block(folder: Path, name: str, blocks: Literal["dense", "sage"]) -> EngineSet:
    """The block of one side, with random weights."""
    return open_engines(synthetic_store(Wanted(side_profile(name, blocks), GRAPHS), folder), GRAPHS)


def side_profile(name: str, blocks: Literal["dense", "sage"]) -> Profile:
    """A shipped profile with an attention of its own choice."""
    loaded = Profile.load(name)
    return loaded.model_copy(
        update={"attention": loaded.attention.model_copy(update={"blocks": blocks}), "quality": {}}
    )


def operations(dimensions: DenoiserDimensions, rows: int) -> dict[str, float]:
    """Operations of a block's attention and of its matrix products."""
    size = dimensions
    matrices = 4 * size.hidden * size.inner + 3 * size.hidden * size.ffn
    return {"attention": 4.0 * rows * rows * size.inner, "linears": 2.0 * rows * matrices}


def caller(engines: EngineSet, rows: int) -> Callable[[], torch.Tensor]:
    """A call of the block on random rows."""
    inputs = block_inputs(engines, rows)
    return lambda: engines.run("block", inputs, 0, PARTITION)["hidden_out"]


def baked_caller(folder: Path, engines: EngineSet, rows: int) -> Callable[[], torch.Tensor]:
    """A call of the block whose weights are in its package, on the rows of the one that binds them."""
    (wanted,) = (each for each in packages() if each.baked)
    (graph,) = graphs(wanted, folder)
    loader = open_package(package(folder, graph, wanted), DEVICE)
    inputs = list(block_inputs(engines, rows).values())

    def run() -> torch.Tensor:
        (result,) = loader.run(list(inputs))
        assert isinstance(result, torch.Tensor)
        return result

    return run


def block_inputs(engines: EngineSet, rows: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random inputs of a block; the angles are angles."""
    generator = torch.Generator(engines.device).manual_seed(seed)
    specs = engines.manifest.graphs["block"].inputs
    drawn = {spec.name: draw_input(spec, {"rows": rows}, generator, TABLE_ROWS) for spec in specs}
    drawn["modulation"] *= 0.1
    return drawn | {"cos": drawn["cos"].cos(), "sin": drawn["cos"].sin()}
