"""Runs aiperf over the HTTP gateway, which it asks as a client of `/v1/videos` does: post, poll, download."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from bench.perf.analyzer import Load
from bench.perf.install import InstallError
from bench.perf.point import COMPARED, Point, Window
from triton_repo.names import ENSEMBLE

VERSION = "0.13.0"

SUMMARY, RECORDS = "profile_export_aiperf.json", "profile_export.jsonl"


class AiperfError(RuntimeError):
    """aiperf failed, or a request of it did."""


def aiperf(folder: Path) -> Path:
    """The program, in an environment of its own below `folder`, which is made if it is missing. Raises InstallError."""
    folder.mkdir(parents=True, exist_ok=True)
    home = folder.absolute() / f"aiperf-{VERSION}"
    complete = home / ".installed"
    with FileLock(folder / "aiperf.lock"):
        if not complete.exists():
            shutil.rmtree(home, ignore_errors=True)
            # In place: an environment's programs name the folder that they were installed into.
            _do(sys.executable, "-m", "venv", str(home))
            _do(str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", f"aiperf=={VERSION}")
            complete.touch()
    return home / "bin" / "aiperf"


def write_tokenizer(tokenizer: Path, folder: Path) -> Path:
    """A folder with a tokenizer.json as aiperf reads one: it counts the prompt's tokens, and would download another."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
    return folder


def run(program: Path, url: str, load: Load, tokenizer: Path, folder: Path) -> tuple[Point, ...]:
    """Measures one sweep, a run for each concurrency; what aiperf writes stays in `folder`. Raises AiperfError."""
    return tuple(_run_one(program, url, load, n, tokenizer, folder / f"concurrency{n}") for n in load.concurrencies)


def _run_one(program: Path, url: str, load: Load, concurrency: int, tokenizer: Path, folder: Path) -> Point:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": load.prompt}) + "\n")
    command = [str(program), *_arguments(url, load, concurrency, tokenizer, folder, prompts)]
    # Offline, it takes no tokenizer of a folder.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise AiperfError(f"aiperf ended with {done.returncode}; its output: {folder}/output.txt")
    return read(folder, load, concurrency)


def read(folder: Path, load: Load, concurrency: int) -> Point:
    """The point of a finished run. Raises AiperfError."""
    summary = json.loads((folder / SUMMARY).read_text())
    records = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    failed = [record["error"]["message"] for record in records if record.get("error")]
    if failed or not records:
        first = failed[0] if failed else "none was made"
        raise AiperfError(f"{len(failed)} of {len(records)} requests failed: {first}")
    latency = summary["request_latency"]
    return Point(
        seconds=load.seconds,
        visit=load.visit,
        concurrency=concurrency,
        clip=load.clip,
        requests=len(records),
        throughput=summary["request_throughput"]["avg"],
        p50=latency["p50"] / 1e3,
        p95=latency["p95"] / 1e3,
        windows=windows(records),
    )


def windows(records: Sequence[Mapping[str, Any]]) -> tuple[Window, ...]:
    """Requests in the order in which they ended, cut into as many windows as perf_analyzer measures."""
    spans = sorted((r["metadata"]["request_end_ns"], r["metadata"]["request_start_ns"]) for r in records)
    size = len(spans) // COMPARED
    begun, found = min(start for _, start in spans), []
    for index in range(COMPARED if size else 0):
        part = spans[index * size : (index + 1) * size]
        latencies = sorted((end - start) / 1e9 for end, start in part)
        ended = part[-1][0]
        found.append(Window(1e9 * size / (ended - begun), latencies[math.ceil(0.95 * size) - 1]))
        begun = ended
    return tuple(found)


def _arguments(url: str, load: Load, concurrency: int, tokenizer: Path, folder: Path, prompts: Path) -> list[str]:
    return [
        *("profile", "--model", ENSEMBLE, "--endpoint-type", "video-generation", "--url", url),
        *("--tokenizer", str(tokenizer), "--input-file", str(prompts), "--custom-dataset-type", "single-turn"),
        *("--extra-inputs", json.dumps(load.params), "--download-video-content"),
        *("--concurrency", str(concurrency), "--request-count", str(COMPARED * max(load.requests, concurrency))),
        *("--output-artifact-dir", str(folder), "--ui", "none", "--no-auto-plot"),
    ]


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise InstallError(f"aiperf {VERSION} cannot be installed: {done.stderr.strip()[-500:]}")
