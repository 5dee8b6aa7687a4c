"""The miniature checkpoint in both layouts, and the graphs of one component emitted once."""

from __future__ import annotations

import pytest
import torch

from export.checkpoint import Checkpoint
from export.miniature import write_miniature


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """The same miniature, by layout."""
    root = tmp_path_factory.mktemp("miniature")
    for layout in ("native", "diffusers"):
        write_miniature(root / layout, layout, seed=5)
    return {layout: Checkpoint.open(root / layout) for layout in ("native", "diffusers")}


@pytest.fixture(params=["native", "diffusers"])
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    """Each layout in turn."""
    return checkpoints[request.param]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)
