"""Builds of the small checkpoint, through the real build."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import build as building
from export.graphs.graph import Graph
from tests.engines import small_checkpoint
from tests.engines.workshop import Workshop, write_profile


def use_small_graphs(patch: pytest.MonkeyPatch) -> None:
    """Makes the build see the small checkpoint and its graphs."""
    patch.setattr(building, "Checkpoint", small_checkpoint.SmallCheckpoint)
    use_graphs(patch, small_checkpoint.graphs)


def use_graphs(patch: pytest.MonkeyPatch, graphs: Callable[..., tuple[Graph, ...]]) -> None:
    """Makes the build see these graphs instead of the profile's; none of their weights is quantised."""
    patch.setattr(building, "profile_graphs", graphs)
    patch.setattr(building, "declared_graphs", lambda *arguments: graphs(*arguments, Path()))
    patch.setattr(building, "profile_sidecars", lambda *arguments: ())


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished workshop, kept aside; its files name the directory that `workshop` restores it to."""
    root = tmp_path_factory.mktemp("workshop")
    workshop = Workshop(root)
    small_checkpoint.write(workshop.checkpoint, seed=1)
    both = '["fl2va", "ref2va"]'
    write_profile(workshop.profile, partitions=both)
    write_profile(workshop.baked_profile, partitions=both, weights='"baked"')
    with pytest.MonkeyPatch.context() as patch:
        use_small_graphs(patch)
        workshop.build()
    shutil.copytree(root, root.with_name("pristine"))
    return root


@pytest.fixture
def workshop(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """The finished workshop, for a test to change as it likes."""
    shutil.rmtree(pristine)
    shutil.copytree(pristine.with_name("pristine"), pristine)
    use_small_graphs(monkeypatch)
    return Workshop(pristine)
