"""Builds of the small checkpoint, through the real build."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import small_checkpoint

from engines import build as building
from engines.build import BuildReport, build
from engines.profile import PROFILES
from engines.steps import StepEvent

Builder = Callable[..., BuildReport]


def write_profile(directory: Path, **changes: str) -> Path:
    """The shipped `cpu` profile on one thread, with some lines changed: `write_profile(d, weights='"baked"')`."""
    lines = (PROFILES / "cpu.toml").read_text().splitlines()
    for key, text in {"threads": "1", **changes}.items():
        lines = [f"{key} = {text}" if line.startswith(f"{key} =") else line for line in lines]
    file = directory / f"{'_'.join(['test', *changes])}.toml"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the build see the small checkpoint and its graphs."""
    monkeypatch.setattr(building, "Checkpoint", small_checkpoint.SmallCheckpoint)
    monkeypatch.setattr(building, "t2va_graphs", small_checkpoint.graphs)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small checkpoint on disk."""
    return small_checkpoint.write(tmp_path / "checkpoint", seed=1)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Both partitions, bound weights."""
    return write_profile(tmp_path, partitions='["fl2va", "ref2va"]')


@pytest.fixture
def store(small_graphs: None, checkpoint: Path, profile: Path, tmp_path: Path) -> Path:
    """A store built from the small checkpoint."""
    return build(checkpoint, profile, tmp_path / "store").store


@pytest.fixture
def events() -> list[StepEvent]:
    """Collects the events of a build."""
    return []
