"""A whole sweep over one server: checked clips first, then each duration in turn at every concurrency."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.perf.point import Point
from bench.perf.workload import Workload
from runtime.probe import inspect_mp4
from triton_repo.client import Client

Measure = Callable[[int, int, float], tuple[Point, ...]]
"""Measures one visit of a duration at every concurrency, given the duration, the visit and the clip's seconds."""

Progress = Callable[[str], None]


class ClipError(RuntimeError):
    """A clip is not what was asked for, so that its time says nothing."""


@dataclass(frozen=True)
class Checked:
    """A clip that was made before anything is measured: its size, and seconds of its longer track."""

    width: int
    height: int
    frames: int
    clip: float

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {"width": self.width, "height": self.height, "frames": self.frames, "clip_s": self.clip}


def warm(url: str, workload: Workload, progress: Progress) -> Mapping[int, Checked]:
    """Makes a clip of each duration, the longest first, and looks at it; by duration. Raises ClipError, ClientError."""
    found = {}
    with Client(url) as client:
        for seconds in sorted(set(workload.seconds), reverse=True):
            progress(f"warm-up: {seconds} s")
            found[seconds] = _checked(client, workload, seconds)
    return found


def sweep(workload: Workload, clips: Mapping[int, Checked], measure: Measure, progress: Progress) -> tuple[Point, ...]:
    """All points, in the order in which they were measured."""
    points: list[Point] = []
    for seconds, visit in workload.order:
        first, last = workload.concurrency
        progress(f"visit {visit} of {workload.visits}: {seconds} s at concurrency {first} to {last}")
        points += measure(seconds, visit, clips[seconds].clip)
    return tuple(points)


def _checked(client: Client, workload: Workload, seconds: int) -> Checked:
    made = client.generate_unary(workload.prompt, workload.params(seconds))
    width, height, frames = (made.resolved[name] for name in ("width", "height", "frames"))
    report = inspect_mp4(made.mp4)
    if problems := report.problems(width, height, frames):
        raise ClipError(f"a clip of {seconds} s is not as requested: " + "; ".join(problems))
    return Checked(width, height, frames, max(report.video.seconds, report.audio.samples / report.audio.sample_rate))
