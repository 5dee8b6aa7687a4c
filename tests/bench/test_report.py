"""A measurement is written whole, as a table and as a plot; the command says what it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench import block, gemm, report
from engines.plan import released_outline
from h3trt.cli import app

MEASURED = {
    "what": "one block",
    "host": {"gpu": "NVIDIA H200", "torch": "2.11.0"},
    "sides": {"ours": {"median_ms": 2.0, "spread_ms": [1.5, 2.5]}, "theirs": {"median_ms": 3.0, "spread_ms": [3, 4]}},
    "stages_s": {"encode": 0.25},
    "memory": {"measured": 59_466e6, "planned": 61_312e6, "measured / planned": 0.96989},
}


def test_a_measurement_becomes_json_a_table_and_a_plot(tmp_path: Path) -> None:
    written = report.write(MEASURED, tmp_path / "results", "block")
    assert [file.name for file in written] == ["block.json", "block.md", "block.svg"]
    assert json.loads(written[0].read_text()) == MEASURED
    table = written[1].read_text()
    assert "| sides, ours | 2.000 | 1.500 | 2.500 |" in table
    assert "| encode | 250 | | |" in table
    assert "59.47 GB measured, 61.31 GB planned, a ratio of 0.9699." in table
    assert "<svg" in written[2].read_text()


def test_operations_of_a_block_are_those_of_the_released_sizes() -> None:
    size = released_outline().dimensions.denoiser
    rows = 58_880
    # 4 S^2 d of 56 heads; q, k, v and out of 5,376 x 7,168 each, three matrices of 5,376 x 14,336.
    assert block.operations(size, rows)["attention"] == 4 * rows**2 * 56 * 128
    assert block.operations(size, rows)["linears"] == 2 * rows * (4 * 5376 * 7168 + 3 * 5376 * 14336)
    assert sum(n * k for n, k in gemm.shapes(size).values()) == 4 * 5376 * 7168 + 3 * 5376 * 14336


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_host_without_a_gpu_is_told_so() -> None:
    result = CliRunner().invoke(app, ["bench", "gemm"])
    assert result.exit_code == 2
    assert "torch finds no GPU to measure on; run: h3trt doctor" in result.output


def test_a_profile_of_another_back_end_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "block", "--profile", "cpu"])
    assert result.exit_code == 2
    assert "backend = 'onnxruntime': must be 'inductor' with a device" in result.output
