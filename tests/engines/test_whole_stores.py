"""Whole stores for GPUs that are not here: the miniature for both generations of RTX cards, the release for B300s."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engines.profile import PROFILES, Profile
from engines.store import EngineStore
from export.miniature import write_miniature, write_sparse_released
from h3trt.exits import Exit
from tests.conftest import H3TRT

pytestmark = pytest.mark.soak


def build(profile: str, root: Path) -> subprocess.CompletedProcess[str]:
    options = ["--profile", profile, "--checkpoint", str(root / "checkpoint"), "--store", str(root / "store")]
    return subprocess.run([*H3TRT, "engines", "build", *options], capture_output=True, text=True)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("profile", ["rtx4090", "rtx5090"])
def test_the_miniature_s_store_is_built_whole_without_the_card(tmp_path: Path, profile: str) -> None:
    write_miniature(tmp_path / "checkpoint", "native", seed=0)
    result = build(profile, tmp_path)
    assert result.returncode == Exit.OK, result.stderr
    manifest = EngineStore.open(tmp_path / "store", to_run=False).manifest
    device = Profile.load(profile).device
    assert device is not None
    for name, engine in manifest.graphs.items():
        assert engine.plan is not None, name
        assert engine.plan.capabilities == (device.capability,)
        assert engine.plan.seconds > 0
        assert engine.plan.peak_host_bytes > 0
        assert engine.difference is not None
        assert engine.difference <= engine.tolerance
    fp8 = {
        name: e.plan.census["gemm.FP8"] for name, e in manifest.graphs.items() if e.plan and "gemm.FP8" in e.plan.census
    }
    assert {"block.project", "block.finish", "context"} == fp8.keys()


@pytest.mark.timeout(1200)
def test_the_release_s_store_for_b300_needs_nothing_more_than_its_plans(tmp_path: Path) -> None:
    write_sparse_released(tmp_path / "checkpoint", "native")
    result = build("b300", tmp_path)
    assert result.returncode == Exit.INCOMPLETE, result.stderr
    done = [line.split() for line in result.stderr.splitlines() if line.startswith("  ")]
    put_off = {name for status, name in done if status == "deferred"}
    assert {name for name in put_off if not name.endswith(".plan")} == {"manifest"}
    assert {name for status, name in done if status == "built"} >= {
        name.replace(".plan", ".emit") for name in put_off - {"manifest"}
    }
    assert f"h3trt engines build --profile b300 --store {tmp_path / 'store'} --resume" in result.stderr


@pytest.mark.timeout(1200)
def test_a_store_for_tensorrt_with_tiers_of_quality_lacks_nothing_but_its_plans(tmp_path: Path) -> None:
    write_miniature(tmp_path / "checkpoint", "native", seed=0)
    profile = tmp_path / "tiers.toml"
    profile.write_text(
        (PROFILES / "h200.toml").read_text() + "\n[quality.sage]\n[quality.skip]\nskip_threshold = 0.05\n"
    )
    result = build(str(profile), tmp_path)
    assert result.returncode == Exit.INCOMPLETE, result.stderr
    words = (line.split() for line in result.stderr.splitlines() if line.startswith("  "))
    done = {line[1]: line[0] for line in words if len(line) == 2}
    for graph in ("block.attend", "block.attend.sage", "block.attend.skip"):
        assert [done[f"{graph}.{step}"] for step in ("emit", "compare", "plan")] == ["built", "built", "deferred"]
