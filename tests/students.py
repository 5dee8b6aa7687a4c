"""Students of the demonstration's miniature: fused from artifacts of the released form, and their engine stores."""

from __future__ import annotations

import shutil
from pathlib import Path

from engines.build import build
from engines.store import EngineStore
from export.artifacts.fuse import fuse
from export.artifacts.read import open_artifact
from export.checkpoint import Checkpoint
from export.checkpoint.components.denoiser import DenoiserConfig
from export.miniature.artifacts import FOLDERS, write_artifacts

SEED = 5


def write_student(store: Path, directory: Path, artifact: str) -> Path:
    """An artifact, one of FOLDERS, fused into the checkpoint of a store; returns the student's directory."""
    base = Checkpoint.open(EngineStore.open(store).manifest.checkpoint.root)
    config = base.catalogue("denoiser").config
    assert isinstance(config, DenoiserConfig)
    write_artifacts(directory / "artifacts", config, SEED)
    opened = open_artifact(directory / "artifacts" / FOLDERS[artifact], base)
    return fuse(opened, base, directory / "student").root


def build_student(store: Path, student: Path) -> Path:
    """A student's store: its base's, brought up to date, since all but few engines are the same."""
    engines = student.parent / "engines"
    shutil.copytree(store, engines)
    report = build(student, "cpu", engines)
    emitted = {name.partition(".")[0] for name in report.built if name.endswith((".emit", ".lower"))}
    learned = Checkpoint.open(student).student
    assert learned is not None
    assert emitted == ({"block"} if learned.video_sparse else set()), "all others are the base's"
    return engines
