"""The build is incremental, resumable, and never harms a store that works."""

from __future__ import annotations

from pathlib import Path

import small_checkpoint

from engines.build import build
from engines.steps import StepEvent


def test_second_build_does_nothing(store: Path, checkpoint: Path, profile: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file() and path.name != ".lock"}
    report = build(checkpoint, profile, store)
    after = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file() and path.name != ".lock"}
    assert {step.status for step in report.steps} == {"reused"}
    assert report.built == ()
    assert after == before
