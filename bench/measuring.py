"""Timing on a GPU: sides in turns, by device events, with median and spread."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

ROUNDS = 5
WARM_ROUNDS = 2


@dataclass(frozen=True)
class Timing:
    """Milliseconds of each round of one side."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.rounds)

    def as_json(self) -> dict[str, float | list[float]]:
        """Median and both ends, in milliseconds."""
        return {"median_ms": self.median, "spread_ms": [min(self.rounds), max(self.rounds)]}


Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of one run."""


def in_turns(
    sides: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, rest: float = 0.0, timer: Timer | None = None
) -> dict[str, Timing]:
    """Times every side once a round, so that whatever drifts meets all of them; warm rounds are left out.

    Each round has an order of its own, so that no side always follows one that leaves the GPU hot, or cool.
    `rest`: seconds without work before each run. A GPU that has no rest is soon held to its power limit. `timer`: by
    default the GPU's.
    """
    timer = timer or once
    for run in sides.values():
        for _ in range(WARM_ROUNDS):
            run()
    milliseconds: dict[str, list[float]] = {name: [] for name in sides}
    drawn = random.Random(0)  # noqa: S311
    for _ in range(rounds):
        for name in drawn.sample(list(sides), len(sides)):
            if timer is once:
                torch.cuda.synchronize()
            time.sleep(rest)
            milliseconds[name].append(timer(sides[name]))
    return {name: Timing(tuple(values)) for name, values in milliseconds.items()}


def once(run: Callable[[], object]) -> float:
    """Milliseconds that the device takes for one run."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def once_on_host(run: Callable[[], object]) -> float:
    """Milliseconds until a run has returned, which on a CPU is when its work is done."""
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def kernels(run: Callable[[], object], rest: float = 0.0, most: int = 25) -> list[dict[str, float | str | int]]:
    """The kernels of one run, longest first: name, calls, milliseconds.

    `rest`: seconds without work before it; without, the run that comes first has the coolest GPU and the fastest clock.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    time.sleep(rest)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    # The driver's own calls are listed as well, and take the device no time.
    timed = [event for event in seen.key_averages() if event.device_time_total]
    events = sorted(timed, key=lambda event: -event.device_time_total)
    return [{"kernel": e.key[:120], "calls": e.count, "ms": e.device_time_total / 1e3} for e in events[:most]]
