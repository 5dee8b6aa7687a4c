"""Reads single values out of Prometheus text, as tritonserver publishes its metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(text: str, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
    """The labels and values of a metric's samples that have at least these labels."""
    for found in _SAMPLE.finditer(text):
        if found["name"] == name:
            own = dict(_LABEL.findall(found["labels"] or ""))
            if labels.items() <= own.items():
                yield own, float(found["value"])


def value(text: str, name: str, **labels: str) -> float | None:
    """The sum of a metric's samples that have these labels; None where there is none."""
    found = [number for _, number in samples(text, name, **labels)]
    return sum(found) if found else None
