"""Blocks with another attention: equal to torch in ONNX Runtime, near the dense block, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from denoiser_checkpoint import DenoiserCheckpoint, denoiser_graphs

from engines.declaration import describe_graph
from export.binding import bind
from export.compare import compare
from export.emit import Emitted, emit
from export.graphs.graph import Graph
from export.passes.choose_attention import choose_attention
from export.trace import build_module
from plugins.block_attention import BlockAttention

ATTENTIONS: tuple[BlockAttention, ...] = ("sage", "skip", "sage+skip")
OPS = {"sage": "sage_attention", "skip": "skip_softmax_attention", "sage+skip": "sage_attention"}
HEADS = 3
ENOUGH = 300
"""Rows of more than one tile, and of a block of keys that is quantised."""


@pytest.fixture(scope="session")
def graphs(denoisers: dict[str, DenoiserCheckpoint]) -> dict[str, Graph]:
    return denoiser_graphs(denoisers["diffusers"], torch.float32)


@pytest.fixture(scope="session")
def chosen(graphs: dict[str, Graph]) -> Callable[[str, BlockAttention], Emitted]:
    def emitted(name: str, attention: BlockAttention) -> Emitted:
        return emit(choose_attention(graphs[name], attention, HEADS))

    return emitted


@pytest.mark.parametrize(
    ("name", "attention"), [("block", "sage+skip"), *(("block.attend", attention) for attention in ATTENTIONS)]
)
def test_onnxruntime_agrees_with_eager(
    chosen: Callable[[str, BlockAttention], Emitted], name: str, attention: BlockAttention
) -> None:
    emitted = chosen(name, attention)
    found = [node.op_type for node in emitted.model.graph.node if node.domain == "h3"]
    assert found.count(OPS[attention]) == 1
    assert "Attention" not in found
    inputs = [spec.name for spec in emitted.graph.inputs]
    assert ("skip_threshold" in inputs) == attention.endswith("skip")
    # compare() itself holds the graph's tolerance; without 8-bit roundings it is the dense graph's.
    assert compare(emitted).worst <= emitted.graph.tolerance
    assert (emitted.graph.tolerance < 1e-4) == (attention == "skip")


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_is_that_of_the_dense_graph_but_for_what_it_rounds(
    graphs: dict[str, Graph], attention: BlockAttention
) -> None:
    dense, other = (choose_attention(graphs["block.attend"], a, HEADS) for a in ("dense", attention))
    heads = tuple(torch.randn(ENOUGH, *spec.shape[1:]) for spec in dense.inputs)  # type: ignore[arg-type]
    threshold = (torch.zeros(1),) if attention.endswith("skip") else ()
    exact = build_module(dense)(*heads)
    found = build_module(other)(*heads, *threshold)
    mixed = found[0] if attention.endswith("skip") else found
    difference = (mixed - exact).norm() / exact.norm()
    # Without a threshold no tile is left out; E4M3's roundings come to some 5%.
    assert difference < (1e-5 if attention == "skip" else 0.08)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_only_what_attends_in_a_block_changes(graphs: dict[str, Graph], attention: BlockAttention) -> None:
    changed = {name for name, graph in graphs.items() if choose_attention(graph, attention, HEADS) is not graph}
    assert changed == {"block", "block.attend"}
    assert all(choose_attention(graph, "dense", HEADS) is graph for graph in graphs.values())
    assert choose_attention(graphs["block"], attention, HEADS).weights is graphs["block"].weights


def test_graphs_with_the_same_tensors_are_told_apart_by_their_attention(graphs: dict[str, Graph]) -> None:
    block = graphs["block"]
    declared = [describe_graph(choose_attention(block, kind, HEADS), bind(block)) for kind in ("dense", *ATTENTIONS)]
    assert declared[0]["inputs"] == declared[1]["inputs"]
    assert declared[2]["inputs"] == declared[3]["inputs"]
    assert all(a != b for a, b in combinations(declared, 2))
