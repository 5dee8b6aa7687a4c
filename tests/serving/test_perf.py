"""The unmodified perf_analyzer on the running server: three requests, and all that `h3trt perf` writes of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.perf.install import InstallError, perf_analyzer
from bench.perf.workload import WORKLOADS
from h3trt.cli import app
from h3trt.paths import PERF
from triton_repo.server import TritonServer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder for the command that has perf_analyzer already, as it lies in this checkout's build folder."""
    try:
        perf_analyzer(ROOT / PERF)
    except InstallError as error:
        pytest.skip(f"no perf_analyzer: {error}")
    folder = tmp_path / "work"
    folder.mkdir()
    for home in (ROOT / PERF).glob("perf_analyzer-*"):
        (folder / home.name).symlink_to(home)
    return folder


def test_a_sweep_leaves_figures_a_table_and_a_plot(
    server: TritonServer, store: Path, work: Path, tmp_path: Path
) -> None:
    workload, out = tmp_path / "three.toml", tmp_path / "out"
    changes = {
        "seconds = [4, 5]": "seconds = [4]",
        "forwards = 2": "forwards = 1",
        "concurrency = [1, 4]": "concurrency = [1, 1]",
        "visits = 2": "visits = 1",
        "requests = 4": "requests = 1",
    }
    text = (WORKLOADS / "cpu.toml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    workload.write_text(text)
    options = ["--url", server.endpoints.grpc, "--store", str(store), "--workload", str(workload)]
    result = CliRunner().invoke(app, ["perf", *options, "--out", str(out), "--work", str(work)])
    assert result.exit_code == 0, result.output
    (point,) = json.loads((out / "perf_cpu.json").read_text())["points"]
    assert point["requests"] >= 3
    assert len(point["windows"]) == 3
    assert point["clip_s"] == pytest.approx(107 / 24, abs=0.1)
    assert point["rtf"] == pytest.approx(point["p50_s"] / point["clip_s"])
    assert set(point["steps"]) == {"h3_prepare", "h3_encode", "h3_denoise", "h3_decode"}
    with (out / "perf_cpu.csv").open(newline="") as lines:
        assert [row["concurrency"] for row in csv.DictReader(lines)] == ["1"]
    assert f"| {point['clip_s']:.2f} | 1 | 1 |" in (out / "perf_cpu.md").read_text()
    assert "<svg" in (out / "perf_cpu.svg").read_text()
