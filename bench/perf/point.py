"""One measured point of a sweep, and whether it had settled."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.perf.workload import Gates

COMPARED = 3
"""Windows that perf_analyzer's own rule looks at."""


@dataclass(frozen=True)
class Window:
    """What one measurement window of a point saw: requests a second, and the p95 latency in seconds."""

    throughput: float
    p95: float


@dataclass(frozen=True)
class Step:
    """Seconds that a request spent at one step of the ensemble, on average."""

    queue: float
    compute: float


@dataclass(frozen=True)
class Point:
    """A duration of clip at a concurrency, in one visit.

    clip: seconds of media. Latencies in seconds, throughput in requests a second. steps: by model, of perf_analyzer
    alone. frames: decoded frames of the clip.
    """

    seconds: int
    visit: int
    concurrency: int
    clip: float
    requests: int
    throughput: float
    p50: float
    p95: float
    windows: tuple[Window, ...]
    steps: Mapping[str, Step] = field(default_factory=dict)

    @property
    def rtf(self) -> float:
        """Median latency over the clip's length: at most 1 is real time."""
        return self.p50 / self.clip

    @property
    def queue(self) -> float:
        """Seconds in the queues of all steps; the ensemble's own figure leaves them out."""
        return sum(step.queue for step in self.steps.values())

    def as_json(self, gates: Gates) -> dict[str, Any]:
        """Everything, and why it does not count as stable if it does not."""
        return {
            "seconds": self.seconds,
            "visit": self.visit,
            "concurrency": self.concurrency,
            "clip_s": self.clip,
            "requests": self.requests,
            "throughput_per_s": self.throughput,
            "p50_s": self.p50,
            "p95_s": self.p95,
            "rtf": self.rtf,
            "queue_s": self.queue,
            "steps": {name: {"queue_s": s.queue, "compute_s": s.compute} for name, s in self.steps.items()},
            "windows": [{"throughput_per_s": w.throughput, "p95_s": w.p95} for w in self.windows],
            "unstable": unstable(self.windows, gates),
        }


def unstable(windows: Sequence[Window], gates: Gates) -> list[str]:
    """The gates that the windows of a point do not keep, each with its figure; none for a stable point."""
    if len(windows) < COMPARED:
        return [f"{len(windows)} windows of {COMPARED}"]
    throughputs = [window.throughput for window in windows]
    last = windows[-COMPARED:]
    figures = {
        "throughput max/min": (_ratio([w.throughput for w in last]), gates.stability),
        "p95 max/min": (_ratio([w.p95 for w in last]), gates.stability),
        "CV": (100 * statistics.stdev(throughputs) / statistics.mean(throughputs), gates.variation),
        "span": (100 * (max(throughputs) - min(throughputs)) / statistics.median(throughputs), gates.span),
    }
    return [f"{name} {value:.1f}% > {limit:g}%" for name, (value, limit) in figures.items() if value > limit]


def _ratio(values: Sequence[float]) -> float:
    """By how many percent the largest is above the smallest."""
    return 100 * (max(values) / min(values) - 1)
