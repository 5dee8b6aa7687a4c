"""Checkpoints of the miniature's and of the release's dimensions, and their graphs in a GPU profile's precision."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engines.graphs import profile_graphs, profile_sidecars
from engines.profile import Arithmetic, Profile, Ranks
from export.checkpoint import Checkpoint
from export.emit import emit
from export.emitted import Emitted
from export.miniature import write_miniature, write_sparse_released

PROFILE = Profile.load("rtx5090")
"""The profile whose precision and sizes the builds here have; SM89's and SM120's cards do not differ in them."""

Graphs = Callable[[Arithmetic, str], Emitted]
"""Gives an emitted graph by the arithmetic of the denoiser and the graph's name."""


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    """The miniature's graphs."""
    root = tmp_path_factory.mktemp("miniature")
    write_miniature(root / "checkpoint", "native", seed=3)
    return _graphs(root)


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    """The graphs of the released dimensions; their weights are files without data, which read as zeros."""
    root = tmp_path_factory.mktemp("released")
    write_sparse_released(root / "checkpoint", "native")
    return _graphs(root)


@pytest.fixture(scope="session")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Emitted]:
    """The miniature's graphs as each of so many ranks runs them, by their number and the graph's name."""
    root = tmp_path_factory.mktemp("ranked")
    write_miniature(root / "checkpoint", "native", seed=3)
    return lambda ranks, name: _graphs(root, shared(ranks))("bfloat16", name)


def shared(ranks: int) -> Profile:
    """The profile with so many cards, which share the packed rows and the text encoder."""
    shares = Ranks(ulysses=ranks, text_encoder=ranks, video_tiles=ranks)
    return PROFILE.model_copy(update={"gpus": ranks, "ranks": shares})


def _graphs(root: Path, base: Profile = PROFILE) -> Graphs:
    checkpoint = Checkpoint.open(root / "checkpoint")

    @cache
    def emitted(arithmetic: Arithmetic, name: str) -> Emitted:
        precision = base.precision.model_copy(update={"denoiser": arithmetic})
        profile = base.model_copy(update={"precision": precision, "row_chunk": 0})
        _make_sidecars(checkpoint, profile, root)
        return emit(next(g for g in profile_graphs(checkpoint, profile, "fl2va", root) if g.name == name))

    return emitted


def _make_sidecars(checkpoint: Checkpoint, profile: Profile, root: Path) -> None:
    """The files of quantised weights, as long as they will be and without data: a build looks at no value."""
    for sidecar in profile_sidecars(checkpoint, profile, "fl2va", root):
        sidecar.path.touch()
        os.truncate(sidecar.path, sidecar.size)
