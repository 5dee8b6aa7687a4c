"""Stores of several CPU ranks, made of the demonstration's."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from engines.build import build
from engines.profile import ONE_RANK, PROFILES
from engines.store import EngineStore
from export.artifacts.artifact import Artifact


def ranked_store(store: Path, directory: Path, adapters: Sequence[Artifact] = (), **ranks: int) -> Path:
    """The demonstration's store with several ranks of some stages, one of the others: `ranked_store(..., ulysses=4)`.

    directory: of the test session, where it is made once. It is that of profile `cpu-ranks2` but for the ranks, one
    thread for each, and the tiers, which are the first and "skip". adapters: what its requests may choose.
    """
    name = "-".join(["ranked", *(f"{stage}{count}" for stage, count in sorted(ranks.items()))])
    built = directory / name / "engines"
    with FileLock(directory / f"{name}.lock"):
        if not built.exists():
            profile = directory / name / "ranked.toml"
            profile.parent.mkdir()
            profile.write_text(_profile(ranks))
            unfinished = directory / name / "unfinished"
            # Brought up to date: what the ranks have like a single one is not built again.
            shutil.copytree(store, unfinished)
            build(EngineStore.open(store).manifest.checkpoint.root, profile, unfinished, adapters=adapters)
            unfinished.rename(built)
    return built


def _profile(ranks: dict[str, int]) -> str:
    text = (PROFILES / "cpu-ranks2.toml").read_text()
    text = re.sub(r'\[quality\.("sage\+skip"|sage)\][^\[]*', "", text).replace('threads = "auto"', "threads = 1")
    for stage, count in (dict(ONE_RANK) | ranks).items():
        text, found = re.subn(rf"{stage} = \d+", f"{stage} = {count}", text)
        assert found == 1, stage
    return text
