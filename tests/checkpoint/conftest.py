"""Miniature checkpoints of one seed in both layouts, and copies of them that a test may break."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from export.miniature import write_miniature

SEED = 7


@pytest.fixture(scope="session")
def native_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints") / "native"
    write_miniature(root, "native", SEED)
    return root


@pytest.fixture(scope="session")
def diffusers_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints") / "diffusers"
    write_miniature(root, "diffusers", SEED)
    return root


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    def copy(root: Path) -> Path:
        return Path(shutil.copytree(root, tmp_path / "copy"))

    return copy
