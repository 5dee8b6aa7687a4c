"""Linear layers divided among ranks: what all ranks' parts add up to is the undivided graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from denoiser_checkpoint import DenoiserCheckpoint, denoiser_graphs, save, small_denoiser
from test_composition import relative, run

from export.checkpoint import materialise
from export.checkpoint.expressions import Stored, Weight
from export.compare import compare, draw
from export.emit import emit
from export.graphs.graph import Graph
from export.passes.quantise_linears import quantise_linears
from export.passes.shard_block import SEGMENTS, shard_block
from export.passes.shard_tensors import ShardError
from export.schemes import SCHEMES, SchemeName
from export.sidecar import plan_sidecar
from plugins.ranks import handle_of
from tests.exchanging import on_threads
from tests.rank_parts import of_rank

HEADS, FFN, LAYER = 4, 192, 1
LAYOUTS = {"native": "interleaved", "native-stacked": "stacked", "diffusers": "split", "diffusers-gated": "split"}
SIZES = {"rows": 50, "tiles": 6, "chunk_rows": 50}


@pytest.fixture(scope="module")
def dividable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DenoiserCheckpoint]:
    """A denoiser whose heads two and four ranks divide, in every layout, and with gates."""
    folder = tmp_path_factory.mktemp("dividable")
    sizes = {"num_attention_heads": HEADS, "ffn_dim": FFN}
    made = {}
    for name, qkv in LAYOUTS.items():
        layout, _, gated = name.partition("-")
        model = small_denoiser(11, torch.bfloat16, gated == "gated", **sizes)
        (folder / name).mkdir()
        made[name] = save(model, layout, qkv, folder / name)
    return made


def drawn(graph: Graph) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {spec.name: draw(spec, SIZES, generator) for spec in graph.inputs}


def in_segments(graphs: dict[str, Graph], x: dict[str, torch.Tensor], ranks: int) -> torch.Tensor:
    """A block, rank after rank, with the sums between its segments."""
    parts = [{n: of_rank(g, rank) for n, g in graphs.items()} for rank in range(ranks)]
    table, index = x["modulation"], x["modulation_index"]
    attending = [x[spec.name] for spec in graphs["block.attend"].inputs if spec.name in x]
    update = torch.zeros(())
    for one in parts:
        heads = run(one["block.project"], LAYER, x["hidden"], table, index, x["cos"], x["sin"])
        update = update + run(one["block.merge"], LAYER, run(one["block.attend"], 0, *heads, *attending))
    assert update.dtype == torch.float32
    fed = [run(one["block.feed"], LAYER, x["hidden"], update, table, index) for one in parts]
    assert all(torch.equal(hidden, fed[0][0]) for hidden, _ in fed)
    update = torch.stack([part for _, part in fed]).sum(0)
    return run(graphs["block.close"], 0, fed[0][0], update, table, index)


def divided(graphs: dict[str, Graph], ranks: int) -> dict[str, Graph]:
    found = {
        g.name: g
        for n in ("block.project", "block.attend", "block.finish")
        for g in shard_block(graphs[n], HEADS, ranks)
    }
    assert tuple(found) == SEGMENTS
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_parts_of_a_block_in_segments_are_the_block(
    dividable: dict[str, DenoiserCheckpoint], layout: str, ranks: int
) -> None:
    graphs = denoiser_graphs(dividable[layout], torch.float32)
    x = drawn(graphs["block"])
    whole = run(graphs["block"], LAYER, *x.values())
    # The same sums in another order.
    assert relative(in_segments(divided(graphs, ranks), x, ranks), whole) < 2e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_sum_inside_the_block_have_the_block_each(
    dividable: dict[str, DenoiserCheckpoint], layout: str
) -> None:
    block, ranks = denoiser_graphs(dividable[layout], torch.float32)["block"], 4
    x = drawn(block)
    (graph,) = shard_block(block, HEADS, ranks)
    results = on_threads(
        ranks,
        lambda group: run(of_rank(graph, group.rank), LAYER, *x.values(), torch.tensor([handle_of(group)])),
    )
    whole = run(block, LAYER, *x.values())
    assert all(torch.equal(result, results[0]) for result in results)
    assert relative(results[0], whole) < 2e-6


@pytest.mark.parametrize("layout", ["native-stacked", "diffusers"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_weights_are_divided_as_they_are(
    dividable: dict[str, DenoiserCheckpoint], layout: str, scheme: SchemeName, tmp_path: Path
) -> None:
    """Scales of channels and blocks go with their values: quantised once, for any number of ranks."""
    graphs = denoiser_graphs(dividable[layout], torch.float32)
    names = ("block", "block.project", "block.attend", "block.finish")
    sidecar = plan_sidecar([graphs["block"]], scheme, tmp_path, "denoiser")
    sidecar.write()
    quantised = {name: quantise_linears(graphs[name], sidecar) for name in names}
    x = drawn(graphs["block"])
    whole = run(quantised["block"], LAYER, *x.values())
    # Rows are quantised as they come, by their largest value: a rank's part of a row has a scale of its own.
    off = relative(in_segments(divided(quantised, 2), x, 2), whole)
    exact = relative(run(graphs["block"], LAYER, *x.values()), whole)
    assert 0 < off < exact
    whole_bytes = sum(weight.nbytes for weight in held(quantised["block"], sidecar.path))
    parts = [held(of_rank(g, rank), sidecar.path) for g in divided(quantised, 2).values() for rank in range(2)]
    shared = {weight for part in parts for weight in part if weight.cut is None}
    bound = sum(materialise(weight).nbytes for part in parts for weight in part if weight.cut is not None)
    assert bound + sum(weight.nbytes for weight in shared) == whole_bytes


def held(graph: Graph, file: Path) -> set[Stored]:
    """What one layer's instance is bound to of a file."""
    bound = graph.weights[LAYER].values() if len(graph.weights) > 1 else ()
    return {weight for weight in bound if isinstance(weight, Stored) and weight.file == file}


def test_a_block_that_sums_is_emitted_as_it_is(dividable: dict[str, DenoiserCheckpoint]) -> None:
    block = denoiser_graphs(dividable["native-stacked"], torch.bfloat16)["block"]
    (graph,) = shard_block(block, HEADS, 2)
    emitted = emit(graph)
    compare(emitted)
    assert emitted.census["h3::all_reduce"] == 2


def test_other_graphs_stay_as_they_are(dividable: dict[str, DenoiserCheckpoint]) -> None:
    prologue = denoiser_graphs(dividable["native"], torch.float32)["prologue"]
    assert shard_block(prologue, HEADS, 2) == (prologue,)


def test_ranks_that_do_not_divide_a_block_are_refused(dividable: dict[str, DenoiserCheckpoint]) -> None:
    block = denoiser_graphs(dividable["native"], torch.float32)["block"]
    rule = "graph block: ranks = 3: must divide its 4 heads, 192 feed-forward channels; nearest legal: 2"
    with pytest.raises(ShardError, match=rule):
        shard_block(block, HEADS, 3)


def test_parts_too_small_to_be_quantised_in_blocks_are_refused(
    dividable: dict[str, DenoiserCheckpoint], tmp_path: Path
) -> None:
    model = small_denoiser(11, torch.bfloat16, num_attention_heads=HEADS, ffn_dim=112)
    graphs = denoiser_graphs(save(model, "diffusers", "split", tmp_path), torch.float32)
    sidecar = plan_sidecar([graphs["block"]], "nvfp4", tmp_path, "denoiser")
    with pytest.raises(ShardError, match="inner size 56: must be a multiple of 16 for nvfp4; take fewer ranks"):
        shard_block(quantise_linears(graphs["block"], sidecar), HEADS, 2)


def test_a_weight_made_of_several_tensors_is_refused(dividable: dict[str, DenoiserCheckpoint]) -> None:
    finish = denoiser_graphs(dividable["native"], torch.float32)["block.finish"]
    name = "feed_forward.down.weight"
    joined = tuple(own | {name: Weight.concat([own[name].rows(0, 8), own[name].rows(8, 80)])} for own in finish.weights)
    with pytest.raises(ShardError, match=rf"graph block\.finish: {name} is made of several stored tensors"):
        shard_block(replace(finish, weights=joined), HEADS, 2)
