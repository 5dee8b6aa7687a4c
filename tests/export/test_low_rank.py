"""Low-rank sides of blocks' linears: the graph with them is the graph of merged weights, however these are packed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from denoiser_checkpoint import CONFIG, DenoiserCheckpoint, denoiser_graphs
from safetensors.torch import load_file, save_file

from export.artifacts.artifact import Artifact, LowRank, Patch
from export.artifacts.base import Base
from export.binding import bind
from export.checkpoint import materialise
from export.checkpoint.components.denoiser import DenoiserConfig
from export.checkpoint.safetensors_file import read_header
from export.compare import compare, draw
from export.emit import emit
from export.graphs.graph import Graph
from export.low_rank import LowRankError, largest_rank, low_rank_sides, plan_low_rank
from export.merged import merged_weights
from export.passes.add_low_rank import add_low_rank
from export.passes.quantise_linears import quantise_linears
from export.passes.shard_rows import shard_rows
from export.sidecar import plan_sidecar
from export.trace import BoundModule
from plugins.distilled import Distilled, PinnedSchedule

RANK, PADDED, SCALE = 6, 8, 0.375
BASE = Base(DenoiserConfig(**CONFIG), 12.0, 3.0)
DISTILLED = Distilled(
    name="turbo",
    family="turbo",
    tasks=("t2va", "fl2va"),
    schedule=PinnedSchedule(forwards=4, video_shift=6.0, audio_shift=3.0),
)
GRAPHS = ("block", "block.project", "block.finish", "context")


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An adapter of every linear. Its scale is no power of two; bfloat16 holds the multiples of B's few digits."""
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for name in BASE.block_linears:
        outputs, inputs = BASE.parameters[f"{name}.weight"].shape or (0, 0)
        tensors[f"{name}.A"] = (torch.randn(RANK, inputs, generator=generator) / inputs**0.5).bfloat16()
        tensors[f"{name}.B"] = (torch.randint(-15, 16, (outputs, RANK), generator=generator) / 16).bfloat16()
    file = tmp_path_factory.mktemp("adapter") / "turbo.safetensors"
    save_file(tensors, file)
    stored = read_header(file).tensors
    sides = {name: LowRank(stored[f"{name}.A"], stored[f"{name}.B"], SCALE) for name in BASE.block_linears}
    return Artifact(file, DISTILLED, {f"{name}.weight": Patch(side) for name, side in sides.items()}, {})


def difference(artifact: Artifact, name: str) -> torch.Tensor:
    """Scale x B A in float64, rows in diffusers' order."""
    tensors = load_file(artifact.path)
    return SCALE * tensors[f"{name}.B"].double() @ tensors[f"{name}.A"].double()


def with_sides(checkpoint: DenoiserCheckpoint, artifact: Artifact, directory: Path, graph: Graph) -> Graph:
    planned = plan_low_rank(artifact, open_as(checkpoint), "fl2va", PADDED, directory)
    if not planned.file.path.exists():
        planned.file.write()
    return add_low_rank(graph, planned.tensors)


def open_as(checkpoint: DenoiserCheckpoint) -> Any:
    """What the exporter reads of a checkpoint, its configuration among it."""
    return SimpleNamespace(
        dimensions=SimpleNamespace(**vars(checkpoint.dimensions), video_shift=12.0, audio_shift=3.0),
        layout=checkpoint.layout,
        partitions=("fl2va",),
        config=lambda component, partition="fl2va": {**CONFIG},
        stored=checkpoint.stored,
        parameters=checkpoint.parameters,
        qkv_layout=checkpoint.qkv_layout,
    )


def run(graph: Graph, instance: int, stored: Mapping[str, torch.Tensor] | None = None) -> tuple[torch.Tensor, ...]:
    """A graph's outputs in eager torch, on rows that depend on nothing but its inputs."""
    generator = torch.Generator().manual_seed(1)
    sizes = {**graph.trials[-1]}
    inputs = tuple(draw(spec, sizes, generator) for spec in graph.inputs)
    binding = bind(graph)
    weights = {name: materialise(tensor) for name, tensor in binding.instances[instance].items()} | dict(stored or {})
    with torch.no_grad():
        found = BoundModule(graph, binding, instance)(inputs, tuple(weights[spec.name] for spec in binding.inputs))
    return found if isinstance(found, tuple) else (found,)


@pytest.fixture(scope="session")
def fused(
    denoisers: dict[str, DenoiserCheckpoint], artifact: Artifact, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, DenoiserCheckpoint]:
    """Each layout's checkpoint with diffusers' own parameters changed, in float32, and saved as the first was."""
    import copy

    from denoiser_checkpoint import save

    made = {}
    for layout, checkpoint in denoisers.items():
        model = copy.deepcopy(checkpoint.reference).float()
        parameters = dict(model.named_parameters())
        for name in BASE.block_linears:
            parameters[f"{name}.weight"].data += difference(artifact, name).float()
        made[layout] = save(model, checkpoint.layout, checkpoint.qkv, tmp_path_factory.mktemp(layout))
    return made


@pytest.mark.parametrize("layout", ["native", "native-stacked", "diffusers"])
@pytest.mark.parametrize("name", GRAPHS)
def test_sides_of_any_packing_compute_what_merged_weights_do(
    denoisers: dict[str, DenoiserCheckpoint],
    fused: dict[str, DenoiserCheckpoint],
    artifact: Artifact,
    tmp_path: Path,
    layout: str,
    name: str,
) -> None:
    base = denoiser_graphs(denoisers[layout], torch.float32)[name]
    graph = with_sides(denoisers[layout], artifact, tmp_path, base)
    wanted = denoiser_graphs(fused[layout], torch.float32)[name]
    for instance in range(len(graph.weights)):
        for ours, theirs, before in zip(run(graph, instance), run(wanted, instance), run(base, instance), strict=True):
            # The same float32 products, added in another order.
            assert (ours - theirs).norm() < 1e-5 * theirs.norm()
            assert (before - theirs).norm() > 1e-2 * theirs.norm()


def test_sides_of_a_ranks_block_are_those_of_the_whole_block(
    denoisers: dict[str, DenoiserCheckpoint],
    fused: dict[str, DenoiserCheckpoint],
    artifact: Artifact,
    tmp_path: Path,
) -> None:
    """Over a group that sends to itself: both exchange alike."""
    base, wanted = (denoiser_graphs(each["native"], torch.float32)["block"] for each in (denoisers, fused))
    graph = with_sides(denoisers["native"], artifact, tmp_path, shard_rows(base, 3, 3))
    for ours, theirs in zip(run(graph, 1), run(shard_rows(wanted, 3, 3), 1), strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize("layout", ["native", "native-stacked", "diffusers"])
def test_merged_weights_are_cast_once_from_the_stored_ones(
    denoisers: dict[str, DenoiserCheckpoint], fused: dict[str, DenoiserCheckpoint], artifact: Artifact, layout: str
) -> None:
    changed = merged_weights(open_as(denoisers[layout]), "fl2va", low_rank_sides(artifact, BASE))
    wanted = fused[layout].stored("denoiser")
    linears = 6 if layout == "diffusers" else 4
    assert len(changed) == linears * (CONFIG["num_layers"] + CONFIG["num_refiner_layers"])
    for key, weight in changed.items():
        assert weight.dtype == denoisers[layout].stored("denoiser")[key].dtype
        found, exact = materialise(weight), materialise(wanted[key])
        # One rounding to the stored dtype, or the other side of its middle where float32 sums differ.
        assert torch.allclose(found.float(), exact.to(weight.dtype).float(), rtol=2**-7, atol=1e-6)
        assert (found != exact.to(weight.dtype)).float().mean() < 1e-3


def test_a_quantised_layer_keeps_its_weights_and_gets_a_side(
    denoisers: dict[str, DenoiserCheckpoint], artifact: Artifact, tmp_path: Path
) -> None:
    graph = denoiser_graphs(denoisers["native"], torch.bfloat16)["block"]
    sidecar = plan_sidecar([graph], "fp8", tmp_path, "denoiser")
    sidecar.write()
    quantised = quantise_linears(graph, sidecar)
    changed = with_sides(denoisers["native"], artifact, tmp_path, quantised)
    before, after = bind(quantised), bind(changed)
    assert after.inputs[: len(before.inputs)] != ()
    assert {spec.name for spec in before.inputs} < {spec.name for spec in after.inputs}
    for own, both in zip(before.instances, after.instances, strict=True):
        assert {name: both[name] for name in own} == own
    added = {spec.name for spec in after.inputs} - {spec.name for spec in before.inputs}
    assert added == {f"{name.removeprefix('transformer_blocks.0.')}.{half}" for name in BASE.block_linears
                     if name.startswith("transformer_blocks.0.") for half in ("down", "up")}  # fmt: skip
    # Both sides of the comparison take the same rows to the same sides of their linears.
    emitted = emit(changed)
    assert compare(emitted, 1).worst <= changed.tolerance


def test_sides_of_zeros_change_nothing(
    denoisers: dict[str, DenoiserCheckpoint], artifact: Artifact, tmp_path: Path
) -> None:
    base = denoiser_graphs(denoisers["native"], torch.float32)["block"]
    graph = with_sides(denoisers["native"], artifact, tmp_path, base)
    added = {spec.name: spec for spec in bind(graph).inputs if spec.name.endswith(".up")}
    zeros = {name: torch.zeros(tuple(s.shape), dtype=s.dtype) for name, s in bind(graph).instances[2].items()}
    zeros = {name: tensor for name, tensor in zeros.items() if name in added}
    assert len(zeros) == 6
    assert torch.equal(run(graph, 2, zeros)[0], run(base, 2)[0])


def test_a_file_has_every_half_once_padded_and_scaled_once(
    denoisers: dict[str, DenoiserCheckpoint], artifact: Artifact, tmp_path: Path
) -> None:
    planned = plan_low_rank(artifact, open_as(denoisers["native"]), "fl2va", PADDED, tmp_path)
    planned.file.write()
    found, given = load_file(planned.file.path), load_file(artifact.path)
    assert planned.file.path.name.startswith("adapter.fl2va.turbo.")
    assert found.keys() == {f"{name}.{half}" for name in BASE.block_linears for half in ("down", "up")}
    name = "transformer_blocks.1.ff.net.0.proj"
    assert torch.equal(found[f"{name}.down"][:RANK], given[f"{name}.A"])
    assert not found[f"{name}.down"][RANK:].any()
    # The native layout holds gate before up, diffusers up before gate.
    scaled = (given[f"{name}.B"].float() * SCALE).bfloat16().roll(CONFIG["ffn_dim"], 0)
    assert torch.equal(found[f"{name}.up"][:, :RANK], scaled)
    assert not found[f"{name}.up"][:, RANK:].any()


def test_the_largest_rank_of_some_adapters_is_that_of_their_engines(artifact: Artifact) -> None:
    assert largest_rank([artifact, artifact], BASE) == RANK


def test_what_no_side_can_say_is_refused_with_what_can(artifact: Artifact) -> None:
    side = next(iter(artifact.patches.values())).low_rank
    assert side is not None
    cases = {
        "transformer_blocks.0.norm1.weight": Patch(difference=side.down),
        "transformer_blocks.0.attn.to_q.weight": Patch(side, difference=side.up),
    }
    for name, patch in cases.items():
        changed = Artifact(artifact.path, artifact.distilled, {**artifact.patches, name: patch}, {})
        with pytest.raises(LowRankError, match=rf"turbo\.safetensors: {name}: .*h3trt adapters fuse"):
            low_rank_sides(changed, BASE)
    kept = {name: patch for name, patch in artifact.patches.items() if "blocks.1.attn.to_v" not in name}
    missing = "transformer_blocks.1.attn.to_v: has no low-rank side"
    with pytest.raises(LowRankError, match=missing):
        low_rank_sides(Artifact(artifact.path, artifact.distilled, kept, {}), BASE)


def test_changes_of_the_modulation_are_no_sides(artifact: Artifact) -> None:
    side = next(iter(artifact.patches.values()))
    more = {f"{name}.weight": side for name in BASE.adaln_linears}
    changed = Artifact(artifact.path, artifact.distilled, {**artifact.patches, **more}, {})
    assert low_rank_sides(changed, BASE) == low_rank_sides(artifact, BASE)
