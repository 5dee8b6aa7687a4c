"""A measurement as files: JSON with everything, a table in Markdown, and a plot where matplotlib is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = tuple[str, float]


def write(measured: Mapping[str, Any], folder: Path, name: str) -> tuple[Path, ...]:
    """Writes `name`.json, .md and, if it can be drawn, .svg; returns what was written."""
    written = write_table(measured, table(measured), folder, name)
    plot = folder / f"{name}.svg"
    return (*written, plot) if _plot(measured, plot) else written


def write_table(measured: Mapping[str, Any], text: str, folder: Path, name: str) -> tuple[Path, ...]:
    """Writes `name`.json and .md, whose text is given; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{name}.json", folder / f"{name}.md"
    written[0].write_text(json.dumps(measured, indent=1) + "\n")
    written[1].write_text(text)
    return written


def table(measured: Mapping[str, Any]) -> str:
    """What was measured, on what, and the median of each side."""
    host = measured.get("host", {})
    lines = [f"{measured['what']}; {host.get('gpu', 'no GPU')}, torch {host.get('torch', '-')}", ""]
    lines += ["| side | median, ms | from | to |", "| --- | ---: | ---: | ---: |"]
    for name, timing in timings(measured):
        low, high = timing["spread_ms"]
        lines.append(f"| {name} | {timing['median_ms']:.3f} | {low:.3f} | {high:.3f} |")
    for stage, seconds in measured.get("stages_s", {}).items():
        lines.append(f"| {stage} | {1e3 * seconds:.0f} | | |")
    if memory := measured.get("memory"):
        gigabytes = (memory[name] / 1e9 for name in ("measured", "planned"))
        text = "Memory at the height: {:.2f} GB measured, {:.2f} GB planned".format(*gigabytes)
        lines += ["", f"{text}, a ratio of {memory['measured / planned']:.4f}."]
    return "\n".join(lines) + "\n"


def timings(measured: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every timing in a measurement, by the names that lead to it."""
    for name, value in measured.items():
        path = f"{place}, {name}" if place else name
        if isinstance(value, Mapping) and "median_ms" in value:
            yield path, value
        elif isinstance(value, Mapping):
            yield from timings(value, path)


def _plot(measured: Mapping[str, Any], file: Path) -> bool:
    """Bars of the medians; False where there is nothing to draw, or nothing to draw with."""
    bars: list[Row] = [(name, timing["median_ms"]) for name, timing in timings(measured)]
    bars += [(stage, 1e3 * seconds) for stage, seconds in measured.get("stages_s", {}).items()]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not bars:
        return False
    figure = Figure(figsize=(9, 0.4 * len(bars) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.barh([name for name, _ in reversed(bars)], [ms for _, ms in reversed(bars)])
    axes.set_xlabel("milliseconds, median")
    axes.set_title(str(measured["what"]), fontsize=9)
    figure.savefig(file, metadata={"Date": None})
    return True
