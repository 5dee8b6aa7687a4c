"""Together the graphs use every tensor of a checkpoint once, and the check says which one they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from export.checkpoint import Checkpoint, Stored
from export.graphs.graph import Graph
from export.graphs.model import Compute, ConsumptionError, check_consumption, model_graphs
from export.miniature import write_miniature

Change = Callable[[dict[str, Stored]], None]


@pytest.fixture(scope="module", params=["native", "diffusers"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory: Path = tmp_path_factory.mktemp("miniature") / request.param
    write_miniature(directory, request.param, seed=1)
    return Checkpoint.open(directory)


@pytest.fixture(scope="module")
def graphs(checkpoint: Checkpoint) -> tuple[Graph, ...]:
    return model_graphs(checkpoint, "fl2va", Compute.uniform(torch.float32))


def changed(graphs: tuple[Graph, ...], name: str, change: Change) -> tuple[Graph, ...]:
    """The graphs, with the last instance's weights of one of them changed."""

    def one(graph: Graph) -> Graph:
        if graph.name != name:
            return graph
        last = dict(graph.weights[-1])
        change(last)
        return replace(graph, weights=(*graph.weights[:-1], last))

    return tuple(one(graph) for graph in graphs)


def problems(checkpoint: Checkpoint, graphs: tuple[Graph, ...]) -> list[str]:
    with pytest.raises(ConsumptionError) as caught:
        check_consumption(checkpoint, graphs, "fl2va")
    return [str(problem) for problem in caught.value.problems]


def test_the_model_uses_every_tensor_of_both_partitions_once(checkpoint: Checkpoint) -> None:
    for partition in ("fl2va", "ref2va"):
        for segmented in (False, True):
            graphs = model_graphs(checkpoint, partition, Compute.uniform(torch.float32), segmented)
            assert any(graph.name == "block.project" for graph in graphs) is segmented
            check_consumption(checkpoint, graphs, partition)


def test_unused_tensor_is_named(checkpoint: Checkpoint, graphs: tuple[Graph, ...]) -> None:
    key = graphs_weight(graphs, "epilogue", "norm.weight").key
    (problem,) = problems(checkpoint, changed(graphs, "epilogue", lambda w: w.pop("norm.weight")))
    assert key in problem
    assert "expected a user among the graphs of denoiser, found none" in problem


def test_forgotten_layer_is_named(checkpoint: Checkpoint, graphs: tuple[Graph, ...]) -> None:
    fewer = tuple(replace(g, weights=g.weights[:-1]) if g.name == "block" else g for g in graphs)
    last = checkpoint.dimensions.denoiser.layers - 1
    assert all(f"blocks.{last}." in problem for problem in problems(checkpoint, fewer))


def test_tensor_used_twice_is_named_with_both_users(checkpoint: Checkpoint, graphs: tuple[Graph, ...]) -> None:
    first = graphs_weight(graphs, "block", "project.norm1.weight", instance=0)
    found = problems(checkpoint, changed(graphs, "block", lambda w: w.update({"project.norm1.weight": first})))
    last = checkpoint.dimensions.denoiser.layers - 1
    assert any(first.key in p and f"found block[0] and block[{last}]" in p for p in found)
    assert any(f"blocks.{last}.norm1.weight" in p and "found none" in p for p in found)


@pytest.mark.parametrize("change", [{"shape": (3, 5)}, {"dtype": torch.float64}])
def test_tensor_of_another_shape_or_dtype_is_named(
    checkpoint: Checkpoint, graphs: tuple[Graph, ...], change: dict
) -> None:
    stored = graphs_weight(graphs, "epilogue", "proj_out.weight")
    wrong = changed(graphs, "epilogue", lambda w: w.update({"proj_out.weight": replace(stored, **change)}))
    (problem,) = problems(checkpoint, wrong)
    assert problem.startswith(f"{stored.file}: {stored.key}: expected {change.get('dtype', stored.dtype)}")
    assert problem.endswith(f"for epilogue[0], found {stored.dtype} {list(stored.shape)}")


def test_missing_tensor_is_named(checkpoint: Checkpoint, graphs: tuple[Graph, ...]) -> None:
    stored = replace(graphs_weight(graphs, "prologue", "proj_in.bias"), key="proj_in.offset")
    found = problems(checkpoint, changed(graphs, "prologue", lambda w: w.update({"proj_in.bias": stored})))
    assert any("proj_in.offset: expected" in p and "found no such tensor" in p for p in found)


def test_weights_of_the_other_partition_are_not_this_ones(checkpoint: Checkpoint) -> None:
    other = model_graphs(checkpoint, "ref2va", Compute.uniform(torch.float32))
    assert any("found no such tensor" in problem for problem in problems(checkpoint, other))


def test_long_lists_are_cut_in_the_message_but_kept_in_the_error(
    checkpoint: Checkpoint, graphs: tuple[Graph, ...]
) -> None:
    with pytest.raises(ConsumptionError, match=r"and \d+ more$") as caught:
        check_consumption(checkpoint, [g for g in graphs if g.name == "prologue"], "fl2va")
    assert len(caught.value.problems) > 100


def graphs_weight(graphs: tuple[Graph, ...], name: str, parameter: str, instance: int = -1) -> Stored:
    (graph,) = [g for g in graphs if g.name == name]
    stored = graph.weights[instance][parameter]
    assert isinstance(stored, Stored)
    return stored
