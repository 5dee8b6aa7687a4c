"""The transformer block of a miniature checkpoint, from its files to engines that run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import build as building
from engines.build import build
from engines.profile import PARTITIONS, Partition, Profile
from engines.sessions.engine_set import EngineSet
from export.checkpoint import Checkpoint
from export.graphs import block
from export.graphs.graph import Graph
from export.miniature import write_miniature
from tests.engines.conftest import use_graphs
from tests.engines.workshop import write_profile

STORES = (("native", "bound"), ("native", "baked"), ("diffusers", "bound"))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], EngineSet]:
    """The block's engines by layout and way of giving weights; one seed, so one model."""
    root = tmp_path_factory.mktemp("miniature")
    for layout in ("native", "diffusers"):
        write_miniature(root / layout, layout, seed=5)
    with pytest.MonkeyPatch.context() as patch:
        use_graphs(patch, _block_alone)
        patch.setattr(building, "check_consumption", lambda checkpoint, graphs, partition: None)
        return {(layout, weights): _build(root, layout, weights) for layout, weights in STORES}


def _block_alone(checkpoint: Checkpoint, profile: Profile, partition: Partition, weights: Path) -> tuple[Graph, ...]:
    return block.graphs(checkpoint, partition, torch.float32)


def _build(root: Path, layout: str, weights: str) -> EngineSet:
    profile = write_profile(root / f"{weights}.toml", weights=f'"{weights}"', partitions='["fl2va", "ref2va"]')
    return EngineSet.open(build(root / layout, profile, root / f"{layout}-{weights}").store)


def run(engines: EngineSet, partition: Partition, instance: int, rows: int = 150) -> torch.Tensor:
    """The block's output for inputs that depend on nothing but their shapes."""
    record = engines.manifest.graphs["block"]
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for spec in record.inputs:
        shape = [rows if isinstance(size, str) else size for size in spec.shape]
        if spec.dtype == "int64":
            inputs[spec.name] = torch.randint(12, shape, generator=generator)
        else:
            inputs[spec.name] = torch.rand(shape, generator=generator) - 0.5
    return engines.run("block", inputs, instance, partition)["hidden_out"]


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("instance", [0, 1])
@pytest.mark.parametrize("other", STORES[1:], ids="-".join)
def test_layout_and_baking_change_nothing(
    engines: dict[tuple[str, str], EngineSet], other: tuple[str, str], partition: Partition, instance: int
) -> None:
    wanted = run(engines["native", "bound"], partition, instance)
    found = run(engines[other], partition, instance)
    # Other graphs or other kernels of the same float32 sums: a few roundings of values up to the largest.
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_every_partition_and_instance_has_weights_of_its_own(engines: dict[tuple[str, str], EngineSet]) -> None:
    outputs = [run(engines["native", "bound"], partition, i) for partition in PARTITIONS for i in (0, 1)]
    for index, output in enumerate(outputs):
        assert all((output - other).abs().max() > 1e-2 * output.abs().max() for other in outputs[:index])


def test_weights_are_read_from_the_checkpoints_own_files(engines: dict[tuple[str, str], EngineSet]) -> None:
    manifest = engines["native", "bound"].manifest
    for partition in PARTITIONS:
        for i, weights in enumerate(manifest.bindings[partition]["block"]):
            stored = Checkpoint.open(manifest.checkpoint.root).stored("denoiser", partition)
            for name, region in weights.items():
                tensor = stored[f"blocks.{i}.{name}"]
                assert (manifest.weight_files[region.file].path, region.offset) == (str(tensor.file), tensor.offset)
