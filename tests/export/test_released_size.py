"""The released dimensions export without their weights ever being in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, resource, sys, time
import torch
from export.checkpoint import Checkpoint
from export.emit import emit
from export.graphs import block, context, epilogue, modulation, prologue

checkpoint = Checkpoint.open(sys.argv[1])
report = {}
for module in (block, modulation, context, prologue, epilogue):
    for graph in module.graphs(checkpoint, "fl2va", torch.bfloat16):
        start = time.monotonic()
        emitted = emit(graph)
        report[graph.name] = {
            "seconds": time.monotonic() - start,
            "bytes": emitted.model.ByteSize(),
            "instances": len(emitted.bindings),
            "bound": sum(stored.nbytes for b in emitted.bindings for stored in b.values()),
        }
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak": peak, "graphs": report}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_whole_denoiser_exports_in_little_memory(tmp_path: Path, layout: str) -> None:
    from export.miniature import write_sparse_released

    write_sparse_released(tmp_path / "released", layout)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "released")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    report = json.loads(done.stdout.splitlines()[-1])
    # The transformer's 66.28 GB (spec/model.md 1a) are all bound, and none of them was read: with every import, half a
    # gigabyte is used.
    assert report["peak"] < 1e9
    graphs = report["graphs"]
    assert sum(graph["bound"] for graph in graphs.values()) == 66_280_430_080
    assert {name: graph["instances"] for name, graph in graphs.items()} == {
        "block": 50,
        "modulation.time": 1,
        "modulation.adaln": 51,
        "context": 1,
        "prologue": 1,
        "epilogue": 1,
    }
    assert all(graph["bytes"] < 50_000 for graph in graphs.values())
