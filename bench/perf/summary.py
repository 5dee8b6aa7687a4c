"""A sweep as files: JSON with everything, CSV of the points, a table in Markdown, and a plot."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STEPS = ("h3_prepare", "h3_encode", "h3_denoise", "h3_decode")
_SCALARS = (
    *("seconds", "visit", "concurrency", "clip_s", "requests", "throughput_per_s", "p50_s", "p95_s", "rtf", "queue_s"),
)


def write(measured: Mapping[str, Any], folder: Path, name: str) -> tuple[Path, ...]:
    """Writes `name`.json, .csv, .md and .svg; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    files = tuple(folder / f"{name}.{suffix}" for suffix in ("json", "csv", "md", "svg"))
    files[0].write_text(json.dumps(measured, indent=1) + "\n")
    _write_csv(measured["points"], files[1])
    files[2].write_text(table(measured))
    _draw(measured, files[3])
    return files


def table(measured: Mapping[str, Any]) -> str:
    """What was measured on what, and a row for each point; one that did not settle says which gate it broke."""
    machine, points = measured["machine"], measured["points"]
    hardware = ", ".join(machine["gpus"]) or f"{machine['processors']} x {machine['processor']}"
    load = ", ".join(f"{value:g}" for value in machine["load"])
    lines = [
        f"{measured['what']}; {measured['client']}; profile {measured['profile']} on {hardware}, load {load}",
        "",
        f"Excludes {measured['excludes']}.",
        "",
    ]
    stepped = any(point["steps"] for point in points)
    names = [*_HEADS, *(("queue, s", *(step.removeprefix("h3_") + ", s" for step in STEPS)) if stepped else ())]
    lines += [f"| {' | '.join([*names, 'stable'])} |", f"| {'---: | ' * len(names)}--- |"]
    lines += [f"| {' | '.join(_cells(point, stepped))} |" for point in points]
    unstable = sum(bool(point["unstable"]) for point in points)
    lines += ["", f"{unstable} of {len(points)} points did not settle.", "", f"Gates: {_gates(measured)}."]
    return "\n".join(lines) + "\n"


_HEADS = ("clip, s", "visit", "concurrency", "requests", "clips a minute", "p50, s", "p95, s", "RTF")


def _cells(point: Mapping[str, Any], stepped: bool) -> list[str]:
    cells = [
        f"{point['clip_s']:.2f}",
        *(str(point[name]) for name in ("visit", "concurrency", "requests")),
        f"{60 * point['throughput_per_s']:.2f}",
        *(f"{point[name]:.2f}" for name in ("p50_s", "p95_s", "rtf")),
    ]
    if stepped:
        computed = (point["steps"].get(step, {}).get("compute_s") for step in STEPS)
        cells += [f"{point['queue_s']:.2f}", *("-" if seconds is None else f"{seconds:.2f}" for seconds in computed)]
    return [*cells, "no: " + "; ".join(point["unstable"]) if point["unstable"] else "yes"]


def _gates(measured: Mapping[str, Any]) -> str:
    gates = measured["workload"]["gates"]
    return (
        f"windows within {gates['stability']:g}% of each other in throughput and p95 latency, throughput with a CV of "
        f"at most {gates['variation']:g}% and a span of at most {gates['span']:g}% of the median"
    )


def _write_csv(points: Sequence[Mapping[str, Any]], file: Path) -> None:
    steps = [f"{step}_{part}" for step in STEPS for part in ("queue_s", "compute_s")]
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, [*_SCALARS, *steps, "unstable"], lineterminator="\n")
        writer.writeheader()
        for point in points:
            row = {name: point[name] for name in _SCALARS} | {"unstable": "; ".join(point["unstable"])}
            for step, parts in point["steps"].items():
                row |= {f"{step}_{part}": value for part, value in parts.items() if step in STEPS}
            writer.writerow(row)


def _draw(measured: Mapping[str, Any], file: Path) -> None:
    """Latency by throughput: a line for each visit of a duration, p50 with a bar to p95; crosses did not settle."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    points = measured["points"]
    for seconds, visit in dict.fromkeys((point["seconds"], point["visit"]) for point in points):
        one = [p for p in points if (p["seconds"], p["visit"]) == (seconds, visit)]
        _line(axes, one, f"{seconds} s, visit {visit}")
    if any(point["unstable"] for point in points):
        axes.plot([], [], "x", color="red", markersize=11, label="did not settle")
    axes.set_xlabel("clips a minute")
    axes.set_ylabel("latency, s: p50, with a bar to p95")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{measured['what']}\n{measured['client']}, by concurrency", fontsize=9)
    axes.legend(fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "h3trt"}):
        figure.savefig(file, metadata={"Date": None})


def _line(axes: Any, points: Sequence[Mapping[str, Any]], label: str) -> None:
    across = [60 * point["throughput_per_s"] for point in points]
    middle = [point["p50_s"] for point in points]
    above = [max(0.0, point["p95_s"] - point["p50_s"]) for point in points]
    axes.errorbar(across, middle, [[0.0] * len(points), above], marker="o", capsize=3, label=label)
    for x, y, point in zip(across, middle, points, strict=True):
        axes.annotate(str(point["concurrency"]), (x, y), textcoords="offset points", xytext=(6, 6), fontsize=8)
        if point["unstable"]:
            axes.plot([x], [y], "x", color="red", markersize=11)
