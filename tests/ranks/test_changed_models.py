"""Students and adapters on ranks that share the packed rows: the latents that one process makes of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.build import build
from engines.store import EngineStore
from export.artifacts.artifact import Artifact
from export.artifacts.read import open_artifact
from export.checkpoint import Checkpoint
from export.checkpoint.components.denoiser import DenoiserConfig
from export.miniature.artifacts import FOLDERS, write_artifacts
from runtime.events import Cancellation
from runtime.peers import Peers
from runtime.pipeline import Pipeline, PipelineStage
from tests.ranks.spawn import run_ranks
from tests.ranks.stores import ranked_store
from tests.students import build_student, write_student

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SMALLEST: dict[str, Any] = {"duration": 5, "aspect_ratio": "1:1", "width": 256, "height": 256, "seed": 7}
STAGES: tuple[PipelineStage, ...] = ("encode", "denoise")
TURBO = "turbo_4step"


def latents(pipeline: Pipeline, adapter: str) -> dict[str, torch.Tensor]:
    chosen = {"lora": {"name": adapter}} if adapter else {}
    taken = pipeline.take("A red fox runs over fresh snow", {**SMALLEST, **chosen})
    encoded = pipeline.encode(taken, lambda event: None, Cancellation())
    ((video, audio),) = pipeline.denoise(taken.resolved, encoded, lambda event: None, Cancellation())
    return {"video": video, "audio": audio}


def shared(rank: int, size: int, store: str, adapter: str) -> dict[str, torch.Tensor]:
    ranks = EngineStore.open(store).manifest.profile.ranks
    return latents(Pipeline.open(store, stages=STAGES, peers=Peers.join(ranks)), adapter)


def compare(alone: Path, ranked: Path, directory: Path, adapter: str = "") -> None:
    expected = latents(Pipeline.open(alone, stages=STAGES), adapter)
    for found in run_ranks(shared, 2, directory, str(ranked), adapter, timeout=600):
        for name, tensor in expected.items():
            # Of scale 1; the sums are the same, in another order.
            assert (found[name] - tensor).abs().max() < 2e-5, name


@pytest.mark.parametrize("artifact", ["fasth3_v1_dense", "fasth3_v1_vsa"])
def test_a_student_is_the_same_on_ranks(store: Path, tmp_path: Path, artifact: str) -> None:
    """One that attends to video tiles scores and chooses them head by head, each rank for its own."""
    alone = build_student(store, write_student(store, tmp_path / "student", artifact))
    compare(alone, ranked_store(alone, tmp_path, ulysses=2), tmp_path / "ranks")


def test_an_adapter_is_the_same_on_ranks(store: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(EngineStore.open(store).manifest.checkpoint.root)
    write_artifacts(tmp_path / "artifacts", DenoiserConfig.model_validate(checkpoint.config("denoiser")), seed=3)
    turbo = open_artifact(tmp_path / "artifacts" / FOLDERS[TURBO], checkpoint)
    assert isinstance(turbo, Artifact)
    alone = tmp_path / "alone"
    shutil.copytree(store, alone)
    build(checkpoint.root, "cpu", alone, adapters=[turbo])
    ranked = ranked_store(store, tmp_path, adapters=[turbo], ulysses=2)
    (name,) = EngineStore.open(ranked).manifest.adapters
    compare(alone, ranked, tmp_path / "ranks", name)
