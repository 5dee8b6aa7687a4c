"""Blocks with gates: in every layout they are diffusers' blocks attending to video tiles, whole and in segments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import LAYOUTS
from denoiser_checkpoint import CONFIG, DenoiserCheckpoint, denoiser_graphs, save, small_denoiser
from test_composition import Packed, diffusers_velocity, our_velocity, relative, run

from engines.declaration import describe_graph
from export.binding import bind
from export.compare import compare
from export.emit import emit
from export.graphs.graph import Graph
from export.passes.choose_attention import choose_attention
from export.passes.quantise_linears import quantise_linears
from export.sidecar import plan_sidecar
from runtime.packing import Layout, layout
from runtime.video_tiles import VideoTiles, video_tiles
from tests.video_sparse import TileProcessor, kept_of, tiles_of

TEXT, AUDIO, GRID = 70, 9, (9, 5, 6)
TENTHS = 7
"""Left out of every ten video tiles."""


@pytest.fixture(scope="session")
def gated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DenoiserCheckpoint]:
    """The same denoiser with gates in every layout."""
    directory: Path = tmp_path_factory.mktemp("gated")
    model = small_denoiser(seed=12, dtype=torch.bfloat16, gated=True)
    return {name: save(model, name.partition("-")[0], qkv, directory) for name, qkv in LAYOUTS.items()}


@pytest.fixture(scope="session")
def sequence() -> Layout:
    frames, rows, columns = GRID
    return layout(torch.ones(TEXT, dtype=torch.int64), (), frames, 2 * rows, 2 * columns, AUDIO)


def packed(sequence: Layout) -> Packed:
    generator = torch.Generator().manual_seed(4)
    return Packed(
        video=torch.randn(len(sequence.video_indices), 96, generator=generator),
        audio=torch.randn(len(sequence.audio_indices), 32, generator=generator),
        text=torch.randn(TEXT, CONFIG["text_dim"], generator=generator).bfloat16().float(),
        timestep_index=sequence.timestep_index,
        tags=sequence.token_tags,
        positions=sequence.position_ids,
        order=sequence.row_order,
    )


def inputs(tiles: VideoTiles) -> tuple[torch.Tensor, ...]:
    return tuple(tiles.inputs.values())


def sparse_reference(sequence: Layout, tenths: int = TENTHS) -> torch.Tensor:
    tiles, prefix = tiles_of(sequence.token_tags[: sequence.target_video.start].tolist(), GRID)
    model = small_denoiser(seed=12, dtype=torch.float32, gated=True)
    for block in model.transformer_blocks:
        block.attn.processor = TileProcessor(tiles, prefix, kept_of(len(tiles) - prefix, tenths))
    return diffusers_velocity(model, packed(sequence))


@pytest.mark.parametrize("name", LAYOUTS)
def test_float32_graphs_are_diffusers_transformer_with_attention_to_tiles(
    gated: dict[str, DenoiserCheckpoint], sequence: Layout, name: str
) -> None:
    tiles = inputs(video_tiles(sequence, TENTHS / 10))
    found = our_velocity(gated[name], torch.float32, packed(sequence), *tiles)
    # float32 here, float64 in the reference's attention; no two tiles score alike to that precision.
    assert relative(found, sparse_reference(sequence)) < 1e-5


def test_what_is_left_out_and_the_gate_matter(gated: dict[str, DenoiserCheckpoint], sequence: Layout) -> None:
    found = our_velocity(gated["native"], torch.float32, packed(sequence), *inputs(video_tiles(sequence, TENTHS / 10)))
    dense = diffusers_velocity(small_denoiser(seed=12, dtype=torch.float32, gated=True), packed(sequence))
    assert relative(found, dense) > 0.01
    assert relative(found, sparse_reference(sequence, TENTHS - 2)) > 1e-3


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_in_segments_is_the_whole_block(
    gated: dict[str, DenoiserCheckpoint], sequence: Layout, name: str
) -> None:
    graphs, tiles = denoiser_graphs(gated[name], torch.float32), inputs(video_tiles(sequence, 0.5))
    hidden, table, index, cos, sin = rows(graphs["block"], sequence)
    whole = run(graphs["block"], 1, hidden, table, index, cos, sin, *tiles)
    chunks = [slice(i, i + 100) for i in range(0, sequence.rows, 100)]
    project, finish = graphs["block.project"], graphs["block.finish"]
    made = [run(project, 1, hidden[c], table, index[c], cos[c], sin[c]) for c in chunks]
    mixed = run(graphs["block.attend"], 0, *(torch.cat(parts) for parts in zip(*made, strict=True)), *tiles)
    found = torch.cat([run(finish, 1, hidden[c], mixed[c], table, index[c]) for c in chunks])
    # The same sums; a matrix product of other heights may take another kernel, which adds in another order.
    assert relative(found, whole) < 2e-6


def rows(block: Graph, sequence: Layout) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    drawn = [
        torch.randn([d if isinstance(d, int) else sequence.rows for d in spec.shape], generator=generator)
        for spec in block.inputs[:5]
    ]
    return drawn[0], drawn[1], sequence.modulation_index, drawn[3], drawn[4]


@pytest.mark.parametrize("name", ["native", "diffusers"])
@pytest.mark.parametrize("graph", ["block", "block.project", "block.attend"])
def test_onnxruntime_agrees_with_eager(gated: dict[str, DenoiserCheckpoint], name: str, graph: str) -> None:
    emitted = emit(denoiser_graphs(gated[name], torch.float32)[graph])
    called = [node.op_type for node in emitted.model.graph.node if node.domain == "h3"]
    assert called.count("video_sparse_attention") == (graph != "block.project")
    assert "Attention" not in called
    # compare() itself holds the graph's tolerance.
    assert compare(emitted).worst <= emitted.graph.tolerance
    gates = [w for w in emitted.weight_names if w == "attn.to_gate_compress.weight"]
    assert len(gates) == (graph != "block.attend")


def test_a_gate_is_quantised_as_the_other_projections_are(gated: dict[str, DenoiserCheckpoint], tmp_path: Path) -> None:
    for name, graph in (("native", "block"), ("diffusers", "block.project")):
        graphs = denoiser_graphs(gated[name], torch.bfloat16)
        sidecar = plan_sidecar(graphs.values(), "fp8", tmp_path / name, "denoiser")
        sidecar.write()
        quantised = quantise_linears(graphs[graph], sidecar)
        gates = {name: w for name, w in quantised.weights[1].items() if "attention.gate." in name}
        assert [name.rpartition(".")[2] for name in gates] == ["weight", "weight_scale"]
        assert {stored.file for w in gates.values() for stored in w.leaves()} == {sidecar.path}
        assert compare(emit(quantised)).worst <= quantised.tolerance


def test_blocks_with_and_without_gates_are_told_apart(
    gated: dict[str, DenoiserCheckpoint], denoisers: dict[str, DenoiserCheckpoint]
) -> None:
    for graph in ("block", "block.attend"):
        sparse, dense = (denoiser_graphs(c["native"], torch.float32)[graph] for c in (gated, denoisers))
        assert describe_graph(sparse, bind(sparse)) != describe_graph(dense, bind(dense))
        assert choose_attention(sparse, "vsa", 3) is sparse
    # The refiner's blocks have none.
    context = denoiser_graphs(gated["native"], torch.float32)["context"]
    assert not any("gate_compress" in stored.key for w in context.weights[0].values() for stored in w.leaves())
