"""Runs perf_analyzer over the ensemble and reads what it writes.

It is told to accept any three windows: a point that its own rule would call unstable ends its whole sweep and leaves no
file. The rule is applied here instead, to the windows that it prints.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.perf.install import Analyzer
from bench.perf.point import COMPARED, Point, Step, Window
from triton_repo.names import ENSEMBLE

ANY = 1_000_000
"""Percent by which windows may differ: more than any do."""

REPORT = "sweep.csv"

_CONCURRENCY = re.compile(r"Request concurrency: (\d+)$")
_PASS = re.compile(r"\s+Pass \[\d+\] throughput: (\S+) infer/sec\. p95 latency: (\d+) usec$")
_REQUESTS = re.compile(r"\s+Request count: (\d+)$")
_STEP = re.compile(r"(?P<model>\w+)_v\d+\." + re.escape(REPORT))


class AnalyzerError(RuntimeError):
    """perf_analyzer failed, or what it wrote is not what was asked for."""


@dataclass(frozen=True)
class Load:
    """One sweep over concurrencies. clip: seconds of media that a request makes. requests: fewest of a window."""

    prompt: str
    params: Mapping[str, Any]
    seconds: int
    visit: int
    clip: float
    concurrencies: range
    requests: int


def run(analyzer: Analyzer, url: str, load: Load, folder: Path) -> tuple[Point, ...]:
    """Measures one sweep; its CSV files, one for the ensemble and one for each step, stay in `folder`.

    Raises:
        AnalyzerError: a request failed, or a report is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "input.json"
    data.write_text(json.dumps({"data": [{"PROMPT": [load.prompt], "PARAMS": [json.dumps(load.params)]}]}))
    command = [*analyzer.command, *_arguments(url, load, data.name)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)  # noqa: S603
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise AnalyzerError(f"perf_analyzer ended with {done.returncode}: {_reason(done.stdout, done.stderr)}")
    return read(folder, load)


def read(folder: Path, load: Load) -> tuple[Point, ...]:
    """The points of a finished sweep, by concurrency. Raises AnalyzerError."""
    output = (folder / "output.txt").read_text()
    printed = dict(_printed(output.splitlines()))
    rows = {int(row["Concurrency"]): row for row in _rows(folder / REPORT)}
    steps = {n: _steps(folder, n) for n in load.concurrencies}
    missing = [n for n in load.concurrencies if n not in rows or n not in printed]
    if missing:
        raise AnalyzerError(
            f"perf_analyzer reported nothing for concurrency {missing}; its output: {folder}/output.txt"
        )
    return tuple(_point(load, n, rows[n], printed[n], steps[n]) for n in load.concurrencies)


def _arguments(url: str, load: Load, data: str) -> list[str]:
    concurrencies = f"{load.concurrencies.start}:{load.concurrencies.stop - 1}:{load.concurrencies.step}"
    return [
        *("-v", "-m", ENSEMBLE, "-i", "grpc", "-u", url, "--input-data", data),
        *("--concurrency-range", concurrencies),
        *("--measurement-mode", "count_windows", "--measurement-request-count", str(load.requests)),
        *("--stability-percentage", str(ANY), "--max-trials", str(COMPARED), "--percentile", "95"),
        *("-f", REPORT, "--verbose-csv"),
    ]


def _printed(lines: Sequence[str]) -> Iterator[tuple[int, tuple[int, tuple[Window, ...]]]]:
    """The requests and the windows of each concurrency."""
    concurrency, windows = 0, list[Window]()
    for line in lines:
        if found := _CONCURRENCY.match(line):
            concurrency, windows = int(found[1]), []
        elif found := _PASS.match(line):
            windows.append(Window(float(found[1]), int(found[2]) / 1e6))
        # Of the client; those of the server and of its steps are counted under other names.
        elif found := _REQUESTS.match(line):
            yield concurrency, (int(found[1]), tuple(windows))


def _rows(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        raise AnalyzerError(f"perf_analyzer wrote no {file}; its output: {file.parent}/output.txt")
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _steps(folder: Path, concurrency: int) -> dict[str, Step]:
    """Time at each step of the ensemble, on average, by model."""
    found = {}
    for file in sorted(folder.glob(f"*.{REPORT}")):
        name = _STEP.fullmatch(file.name)
        row = next((row for row in _rows(file) if int(row["Concurrency"]) == concurrency), None)
        if name is None or row is None:
            continue
        compute = sum(float(row[f"Server Compute {part}"]) for part in ("Input", "Infer", "Output"))
        found[name["model"]] = Step(float(row["Server Queue"]) / 1e6, compute / 1e6)
    return found


def _point(
    load: Load,
    concurrency: int,
    row: Mapping[str, str],
    printed: tuple[int, tuple[Window, ...]],
    steps: Mapping[str, Step],
) -> Point:
    requests, windows = printed
    return Point(
        seconds=load.seconds,
        visit=load.visit,
        concurrency=concurrency,
        clip=load.clip,
        requests=requests,
        throughput=float(row["Inferences/Second"]),
        p50=float(row["p50 latency"]) / 1e6,
        p95=float(row["p95 latency"]) / 1e6,
        windows=windows,
        steps=steps,
    )


def _reason(output: str, errors: str) -> str:
    lines = [line.strip() for line in (errors.strip() or output.strip()).splitlines() if line.strip()]
    return " ".join(lines[-3:])[-500:] or "it said nothing"
