"""Adapters on a real GPU: compiled blocks over one copy of the base's weights, one adapter after another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import build as building
from engines import switchable
from engines.build import build
from engines.profile import PROFILES, Partition, Profile
from engines.sessions.engine_set import EngineSet
from export.artifacts.artifact import Artifact
from export.artifacts.read import open_artifact
from export.binding import bind
from export.checkpoint import Checkpoint, materialise
from export.checkpoint.components.denoiser import DenoiserConfig
from export.graphs import block
from export.graphs.graph import Graph
from export.merged import merged_weights
from export.miniature import write_miniature
from export.miniature.artifacts import FOLDERS, write_artifacts
from export.trace import BoundModule

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

ROWS = 300


def graphs(checkpoint: Checkpoint, profile: Profile, partition: Partition, weights: Path = Path()) -> tuple[Graph, ...]:
    return block.graphs(checkpoint, partition, torch.bfloat16)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, list[Artifact], dict[str, EngineSet]]:
    """The miniature's blocks, two adapters, and the engines of both modes."""
    root = tmp_path_factory.mktemp("adapters")
    write_miniature(root / "checkpoint", "native", seed=5)
    checkpoint = Checkpoint.open(root / "checkpoint")
    write_artifacts(root, DenoiserConfig.model_validate(checkpoint.config("denoiser")), seed=2)
    found = [open_artifact(root / FOLDERS[name], checkpoint) for name in ("turbo_4step", "turbo_8step")]
    artifacts = [one for one in found if isinstance(one, Artifact)]
    text, engines = (PROFILES / "h200_inductor.toml").read_text(), {}
    with pytest.MonkeyPatch.context() as patch:
        for module in (building, switchable):
            patch.setattr(module, "profile_graphs", graphs)
            patch.setattr(module, "declared_graphs", graphs)
        patch.setattr(switchable, "ADAPTED", ("block",))
        patch.setattr(building, "profile_sidecars", lambda *arguments: ())
        patch.setattr(building, "check_consumption", lambda *arguments: None)
        for mode in ("low_rank", "merged"):
            profile = root / f"{mode}.toml"
            profile.write_text(f'{text}\n[adapters]\nmode = "{mode}"\n')
            engines[mode] = EngineSet.open(build(checkpoint.root, profile, root / mode, adapters=artifacts).store)
    return checkpoint, artifacts, engines


def inputs(engines: EngineSet) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for spec in engines.manifest.graphs["block"].inputs:
        shape = [ROWS if isinstance(size, str) else size for size in spec.shape]
        drawn = torch.rand(shape, generator=generator) - 0.5
        dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
        whole = torch.randint(12, shape, generator=generator)
        found[spec.name] = (whole if spec.dtype == "int64" else drawn.to(dtype)).cuda()
    return found


@pytest.mark.parametrize("mode", ["low_rank", "merged"])
def test_each_run_is_what_it_is_alone_and_near_the_merged_weights(
    made: tuple[Checkpoint, list[Artifact], dict[str, EngineSet]], mode: str
) -> None:
    checkpoint, artifacts, both = made
    engines, given = both[mode], inputs(both[mode])
    first, second = (artifact.distilled.name for artifact in artifacts)
    order = (None, first, second, first, None)
    found = [engines.run("block", given, 1, "fl2va", adapter=name)["hidden_out"] for name in order]
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[0], found[4])
    assert torch.equal(found[0], both["merged"].run("block", given, 1, "fl2va")["hidden_out"])
    (graph,) = graphs(checkpoint, Profile.load("h200_inductor"), "fl2va")
    for artifact, ours in zip(artifacts, found[1:3], strict=True):
        sides = {n.removesuffix(".weight"): p.low_rank for n, p in artifact.patches.items() if p.low_rank}
        changed = merged_weights(checkpoint, "fl2va", sides)
        binding = bind(graph)
        weights = tuple(
            materialise(changed.get(stored.key, stored)).cuda()
            for stored in (binding.instances[1][spec.name] for spec in binding.inputs)
        )
        with torch.no_grad():
            exact = BoundModule(graph, binding, 1)(tuple(given.values()), weights)
        assert isinstance(exact, torch.Tensor)
        # Both round to bfloat16 after every product, at different places.
        assert (ours.float() - exact.float()).norm() < 2e-2 * exact.float().norm()
        assert (found[0].float() - exact.float()).norm() > 5e-2 * exact.float().norm()
