"""Blocks of the release's sizes whose rows two GPUs share, against the same blocks on one GPU and in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import sharded

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < sharded.RANKS,
    reason=f"torch finds {torch.cuda.device_count()} CUDA devices, {sharded.RANKS} share rows",
)

ROUNDING = 2**-8
"""Of a bfloat16 value, relative to it: two results that are both right may be that far apart."""


@pytest.mark.parametrize("rows", sharded.ROWS)
def test_two_gpus_compute_what_one_does(tmp_path: Path, rows: int) -> None:
    found = sharded.measure(tmp_path, (rows,), rounds=1, compiled=False)["rows"][str(rows)]["errors"]
    assert found["2 GPUs from one"] < ROUNDING
    # Neither is the better one.
    assert found["2 GPUs from float32"] < 1.02 * found["one GPU from float32"]
    # What the other rank's rows add is far above what is allowed.
    assert found["2 GPUs that do not exchange from one"] > 10 * ROUNDING
