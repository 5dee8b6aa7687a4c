"""Measures one denoising step's blocks with bound weights against baked ones, side by side, on this machine's CPU.

    python bench/bound_vs_baked.py CHECKPOINT --rows 2524 --out bench/results/bound_vs_baked.json

Both stores are built (or reused) in a directory of their own. The two are measured in turns, so that whatever else the
machine does hits both; a round is every instance of the block once. The report has the machine's load averages: where
they are above what this program itself makes, the seconds say little and only the ratio is of use.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engines.build import build
from engines.machine import available_processors
from engines.profile import PROFILES
from engines.sessions.engine_set import EngineSet

MODES = ("bound", "baked")


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds, measures and writes the result."""
    options = _parse(arguments)
    engines = {mode: EngineSet.open(_store(options.checkpoint, options.stores, mode)) for mode in MODES}
    seconds = measure(engines, options.rows, options.rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report(engines, options.rows, seconds), indent=1) + "\n")


def measure(engines: dict[str, EngineSet], rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by mode; a first round that opens sessions and maps weights is left out."""
    inputs = _inputs(engines["bound"], rows)
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    for index in range(rounds + 1):
        for mode, each in engines.items():
            elapsed = _round(each, inputs)
            if index:
                seconds[mode].append(elapsed)
    return seconds


def report(engines: dict[str, EngineSet], rows: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """The measurement with what it was taken on."""
    medians = {mode: statistics.median(values) for mode, values in seconds.items()}
    manifest = engines["bound"].manifest
    return {
        "what": "all instances of the block, one step; no prologue, no epilogue, no sampler",
        "machine": {"processors": available_processors(), "architecture": platform.machine(), "load": os.getloadavg()},
        "versions": manifest.versions,
        "dimensions": manifest.dimensions.denoiser.model_dump(),
        "rows": rows,
        "instances": manifest.graphs["block"].instances,
        "seconds": seconds,
        "median_seconds": medians,
        "bound_over_baked": medians["bound"] / medians["baked"],
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint directory, for example a miniature")
    parser.add_argument("--rows", type=int, default=2524, help="packed rows; 2,524 are 256x256, 4 s")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds of each")
    parser.add_argument("--stores", type=Path, default=Path("build/bench"), help="where the two stores are built")
    parser.add_argument("--out", type=Path, default=Path("bench/results/bound_vs_baked.json"))
    return parser.parse_args(arguments)


def _store(checkpoint: Path, stores: Path, mode: str) -> Path:
    """The engines of the `cpu` profile with its weights bound or baked."""
    profile = stores / f"{mode}.toml"
    profile.parent.mkdir(parents=True, exist_ok=True)
    # Baked weights are those of one engine, so there is one tier.
    lines = (PROFILES / "cpu.toml").read_text().partition("[quality")[0].splitlines()
    profile.write_text("\n".join(f'weights = "{mode}"' if line.startswith("weights =") else line for line in lines))
    return build(checkpoint, profile, stores / mode).store


def _inputs(engines: EngineSet, rows: int) -> dict[str, torch.Tensor]:
    """Random inputs of the block; its modulation indices are below the rows of its modulation table."""
    generator = torch.Generator().manual_seed(0)
    specs = {spec.name: spec for spec in engines.manifest.graphs["block"].inputs}
    shapes = {name: [rows if isinstance(n, str) else n for n in spec.shape] for name, spec in specs.items()}
    slots = shapes["modulation"][0]
    return {
        name: torch.randint(slots, shape, generator=generator)
        if specs[name].dtype == "int64"
        else torch.rand(shape, generator=generator) - 0.5
        for name, shape in shapes.items()
    }


def _round(engines: EngineSet, inputs: dict[str, torch.Tensor]) -> float:
    started = time.perf_counter()
    for instance in range(engines.manifest.graphs["block"].instances):
        engines.run("block", inputs, instance)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
