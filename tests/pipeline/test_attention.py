"""A profile whose blocks skip tiles: steps above the gate are dense, steps below it are not, with the same engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engines.build import build
from engines.profile import PROFILES
from engines.store import EngineStore
from tests.pipeline.test_segments import latents

HALF = 'blocks = "skip"\nskip_threshold = 0.5\nskip_below = '
"""Tiles below half of a row's largest weight are left out: far more than anybody would."""


@pytest.fixture(scope="module")
def skipping(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Stores of the demonstration's checkpoint that skip in no step, and in every step."""
    root = EngineStore.open(store).manifest.checkpoint.root
    folder, found = tmp_path_factory.mktemp("skipping"), []
    for name, gate in (("never", "0.0"), ("always", "1.0")):
        profile = folder / f"{name}.toml"
        profile.write_text((PROFILES / "cpu.toml").read_text().replace('blocks = "dense"', HALF + gate))
        shutil.copytree(found[-1] if found else store, folder / name)
        report = build(root, profile, folder / name)
        found.append(report.store)
    assert set(report.built) == {"manifest"}, "the gate is no part of any engine"
    return found[0], found[1]


def test_gate_decides_in_which_steps_tiles_are_skipped(store: Path, skipping: tuple[Path, Path]) -> None:
    dense, never, always = (latents(each) for each in (store, *skipping))
    for exact, gated, skipped in zip(dense, never, always, strict=True):
        # The same sums in another order; latents are of scale 1.
        assert (exact - gated).abs().max() < 2e-5
        assert (exact - skipped).abs().max() > 1e-3
    assert all(torch.isfinite(part).all() for part in always)
