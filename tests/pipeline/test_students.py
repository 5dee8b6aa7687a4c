"""A student from its released form to latents: an adapter fused, engines built, its schedule run as diffusers does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engines.build import build
from engines.sessions.engine_set import EngineSet
from engines.store import EngineStore
from export.artifacts.fuse import fuse
from export.artifacts.read import open_artifact
from export.checkpoint import Checkpoint
from export.checkpoint.components.denoiser import DenoiserConfig
from export.miniature.artifacts import FOLDERS, write_artifacts
from h3trt.reference import ReferencePipeline
from h3trt.verify import engine_checks, pipeline_checks
from h3trt.verify_requests import requests
from runtime.pipeline import Pipeline

SEED = 5


@pytest.fixture(scope="module")
def student(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FastH3 v1's dense variant, fused into the demonstration's checkpoint."""
    directory = tmp_path_factory.mktemp("student")
    base = Checkpoint.open(EngineStore.open(store).manifest.checkpoint.root)
    config = base.catalogue("denoiser").config
    assert isinstance(config, DenoiserConfig)
    write_artifacts(directory / "artifacts", config, SEED)
    artifact = open_artifact(directory / "artifacts" / FOLDERS["fasth3_v1_dense"], base)
    return fuse(artifact, base, directory / "student").root


@pytest.fixture(scope="module")
def pipeline(store: Path, student: Path) -> Pipeline:
    engines = student.parent / "engines"
    shutil.copytree(store, engines)
    report = build(student, "cpu", engines)
    assert not [name for name in report.built if name.endswith((".emit", ".lower"))], "engines are the base's"
    return Pipeline.open(engines)


def test_its_clip_is_that_of_diffusers_on_the_fused_weights(pipeline: Pipeline, student: Path) -> None:
    checkpoint = Checkpoint.open(student)
    (taken,) = requests(pipeline, 49, SEED)
    assert (taken.resolved.forwards, taken.resolved.positions) == (4, checkpoint.student.schedule.positions)
    checks = list(pipeline_checks(pipeline, ReferencePipeline(checkpoint), taken))
    assert len([check for check in checks if "latents after step" in check.name]) == 4
    assert [f"{check.title}: {check.measured}" for check in checks if not check.passed] == []


def test_the_engines_that_are_left_are_verified_on_its_weights(pipeline: Pipeline, student: Path) -> None:
    store = EngineStore.open(student.parent / "engines")
    checks = list(engine_checks(EngineSet.open(store), Checkpoint.open(student)))
    assert {check.name.split()[1].partition("[")[0] for check in checks} == set(store.manifest.graphs)
    assert [check.title for check in checks if not check.passed] == []
