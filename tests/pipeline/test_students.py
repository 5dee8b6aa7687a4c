"""A student from its released form to latents: an adapter fused, engines built, its schedule run as diffusers does."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.sessions.engine_set import EngineSet
from engines.store import EngineStore
from export.checkpoint import Checkpoint
from h3trt.reference import ReferencePipeline
from h3trt.verify import engine_checks, pipeline_checks
from h3trt.verify_requests import requests
from runtime.pipeline import Pipeline
from tests.students import build_student, write_student


@pytest.fixture(scope="module", params=["fasth3_v1_dense", pytest.param("fasth3_v1_vsa", marks=pytest.mark.soak)])
def student(store: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A variant of FastH3 v1, fused into the demonstration's checkpoint."""
    return write_student(store, tmp_path_factory.mktemp("student"), request.param)


@pytest.fixture(scope="module")
def pipeline(store: Path, student: Path) -> Pipeline:
    return Pipeline.open(build_student(store, student))


def test_its_clip_is_that_of_diffusers_on_the_fused_weights(pipeline: Pipeline, student: Path) -> None:
    checkpoint = Checkpoint.open(student)
    assert checkpoint.student is not None
    (taken,) = requests(pipeline, 49, 5)
    assert (taken.resolved.forwards, taken.resolved.positions) == (4, checkpoint.student.schedule.positions)
    checks = list(pipeline_checks(pipeline, ReferencePipeline(checkpoint), taken))
    assert len([check for check in checks if "latents after step" in check.name]) == 4
    assert [f"{check.title}: {check.measured}" for check in checks if not check.passed] == []


def test_the_engines_that_are_left_are_verified_on_its_weights(pipeline: Pipeline, student: Path) -> None:
    store = EngineStore.open(student.parent / "engines")
    checks = list(engine_checks(EngineSet.open(store), Checkpoint.open(student)))
    assert {check.name.split()[1].partition("[")[0] for check in checks} == set(store.manifest.graphs)
    assert [check.title for check in checks if not check.passed] == []
