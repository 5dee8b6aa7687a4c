"""Graphs of one rank: equal to torch in ONNX Runtime, and together to the graph that has all rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from denoiser_checkpoint import DenoiserCheckpoint, denoiser_graphs, save, small_denoiser

from engines.declaration import describe_graph
from export.binding import bind
from export.checkpoint import materialise
from export.compare import compare, draw
from export.emit import emit
from export.graphs.graph import Axis, Graph
from export.passes.choose_attention import choose_attention
from export.passes.shard_rows import shard_rows
from export.passes.shard_tensors import ShardError
from export.passes.share_heads import share_heads
from export.trace import BoundModule
from plugins.block_attention import BlockAttention
from plugins.ranks import Group, handle_of
from tests.exchanging import on_threads

HEADS = 3
RANKS = 3
LOCAL = ("hidden", "modulation_index", "cos", "sin")
"""A block's inputs of which a rank has its own rows."""


@pytest.fixture(scope="session")
def graphs(denoisers: dict[str, DenoiserCheckpoint]) -> dict[str, Graph]:
    return denoiser_graphs(denoisers["diffusers"], torch.float32)


@pytest.fixture(scope="session")
def gated_block(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    model = small_denoiser(seed=12, dtype=torch.bfloat16, gated=True)
    directory: Path = tmp_path_factory.mktemp("gated")
    return denoiser_graphs(save(model, "native", "interleaved", directory), torch.float32)["block"]


@pytest.mark.parametrize("name", ["prologue", "block", "epilogue"])
def test_onnxruntime_agrees_with_eager(graphs: dict[str, Graph], name: str) -> None:
    """The exchanges are identity in both; see tests/plugins/test_ulysses_all_to_all.py for the exchanges."""
    emitted = emit(shard_rows(graphs[name], RANKS, HEADS))
    assert compare(emitted).worst <= emitted.graph.tolerance <= 1e-5
    called = [node.op_type for node in emitted.model.graph.node if "ulysses" in node.op_type]
    exchanges = ["ulysses_all_to_all", "ulysses_all_to_all_back"]
    assert called == (exchanges if name == "block" else [])


def test_a_block_with_gates_is_emitted_with_an_exchange_of_gates(gated_block: Graph) -> None:
    emitted = emit(shard_rows(gated_block, RANKS, HEADS))
    assert compare(emitted).worst <= emitted.graph.tolerance
    assert emitted.census["h3::ulysses_all_to_all_gated"] == 1
    rows = {spec.name: spec.shape[0].name for spec in emitted.graph.inputs if isinstance(spec.shape[0], Axis)}
    assert rows["row_tiles"] == rows["sequence"] == "rows"
    assert rows["hidden"] == rows["cos"] == "local_rows"


@pytest.mark.parametrize(
    ("attention", "rows"), [("dense", 1), ("dense", 9), ("dense", 31), ("skip", 31), ("sage", 301)]
)
def test_ranks_together_are_the_whole_block(graphs: dict[str, Graph], attention: BlockAttention, rows: int) -> None:
    threshold = {"skip_threshold": torch.zeros(1)} if attention == "skip" else {}
    _check(choose_attention(graphs["block"], attention, HEADS), {"rows": rows}, threshold)


def test_ranks_together_are_the_whole_block_that_attends_to_tiles(gated_block: Graph) -> None:
    _check(gated_block, {"rows": 50, "tiles": 6}, {})


def _check(graph: Graph, sizes: Mapping[str, int], given: dict[str, torch.Tensor]) -> None:
    sharded = shard_rows(graph, RANKS, HEADS)
    assert sharded.weights is graph.weights
    generator = torch.Generator().manual_seed(7)
    inputs = {spec.name: draw(spec, sizes, generator) for spec in graph.inputs} | given
    expected = _run(graph, inputs)
    rows = sizes["rows"]
    local = -(-rows // RANKS)

    def work(group: Group) -> tuple[torch.Tensor, ...]:
        mine = {name: _share(x, group.rank, local) if name in LOCAL else x for name, x in inputs.items()}
        exchanged = {"sequence": torch.zeros(rows, dtype=torch.int64), "group": torch.tensor([handle_of(group)])}
        return _run(sharded, mine | exchanged)

    found = on_threads(RANKS, work)
    # The same sums in float32, over rows in another order of blocks.
    assert (torch.cat([hidden for hidden, *_ in found])[:rows] - expected[0]).abs().max() < 1e-5
    for counts in zip(*(skipped for _, *skipped in found), strict=True):
        assert torch.equal(torch.cat(counts), expected[1])


def _run(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    binding = bind(graph)
    weights = tuple(materialise(binding.instances[1][weight.name]) for weight in binding.inputs)
    with torch.no_grad():
        result = BoundModule(graph, binding, 1)(tuple(inputs[spec.name] for spec in graph.inputs), weights)
    return result if isinstance(result, tuple) else (result,)


def _share(rows: torch.Tensor, rank: int, local: int) -> torch.Tensor:
    """A rank's rows; behind the sequence's last, what would show if it were read."""
    mine = rows[rank * local : (rank + 1) * local]
    filler = torch.nan if rows.is_floating_point() else 0
    return torch.cat([mine, torch.full((local - len(mine), *rows.shape[1:]), filler, dtype=rows.dtype)])


def test_only_what_works_on_packed_rows_changes(graphs: dict[str, Graph]) -> None:
    changed = {name for name, graph in graphs.items() if shard_rows(graph, RANKS, HEADS) is not graph}
    assert changed == {"prologue", "block", "epilogue"}
    assert all(shard_rows(graph, 1, HEADS) is graph for graph in graphs.values())


def test_graphs_of_other_numbers_of_ranks_are_told_apart(graphs: dict[str, Graph]) -> None:
    block = graphs["block"]
    two, four = (describe_graph(shard_rows(block, ranks, 4), bind(block)) for ranks in (2, 4))
    assert two["inputs"] == four["inputs"]
    assert two != four


@pytest.mark.parametrize(("heads", "ranks", "nearest"), [(56, 5, 4), (56, 16, 14), (56, 57, 56)])
def test_heads_that_cannot_be_dealt_are_refused(graphs: dict[str, Graph], heads: int, ranks: int, nearest: int) -> None:
    rule = f"ranks = {ranks}: must divide its {heads} attention heads; nearest legal: {nearest}"
    with pytest.raises(ShardError, match=f"graph block: {rule}"):
        shard_rows(graphs["block"], ranks, heads)
    with pytest.raises(ShardError, match=f"graph block.attend: {rule}"):
        share_heads(graphs["block.attend"], heads, ranks)


@pytest.mark.parametrize("ranks", [2, 4, 7, 8, 14, 28, 56])
def test_heads_of_the_release_are_dealt_to_all_their_divisors(graphs: dict[str, Graph], ranks: int) -> None:
    sharded = shard_rows(choose_attention(graphs["block"], "skip", 56), ranks, 56)
    assert sharded.outputs[1].shape == (56 // ranks,)
