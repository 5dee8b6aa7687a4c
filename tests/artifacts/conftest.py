"""A miniature with artifacts of every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.checkpoint import Checkpoint
from export.miniature import ARTIFACTS, write_miniature

SEED = 5


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("artifacts") / "native"
    write_miniature(directory, "native", SEED, artifacts=True)
    return directory


@pytest.fixture(scope="session")
def artifacts(root: Path) -> Path:
    return root / ARTIFACTS


@pytest.fixture(scope="session")
def checkpoint(root: Path) -> Checkpoint:
    return Checkpoint.open(root)
