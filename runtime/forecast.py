"""When a request would be finished on this server, and whether its deadline can be met."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from engines.store import Manifest
from runtime import timings
from runtime.estimate import WORK_STAGES, Estimate, Queue, WorkStage
from runtime.refusal import RequestError
from runtime.request import Resolved
from runtime.timings import Prediction, Record, predict
from runtime.work import Work, work_of

MICROSECONDS = 1_000_000


class Late(Exception):
    """A request that the queue makes too late for its deadline; it would be accepted at a quieter time."""

    def __init__(self, deadline: float, why: str) -> None:
        super().__init__(f"late: the deadline of {deadline:g} s cannot be met: {why}")


def now() -> int:
    """Microseconds of the clock that all processes of this machine share and that no correction of the time moves."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


class Forecaster:
    """Estimates requests from what the processes of one server have measured, in files of a folder."""

    def __init__(self, manifest: Manifest, folder: Path | None, clock: Callable[[], int] = now) -> None:
        """`folder`: where the records are; None: nothing is known."""
        self.dimensions = manifest.dimensions
        """Those that work is counted by."""
        self._on_gpu = manifest.profile.on_gpu
        self._identity = timings.identity(manifest)
        self._folder = folder
        self._clock = clock

    def estimate(
        self,
        resolved: Resolved,
        text_rows: int,
        memory_bytes: int,
        queue: Queue | None = None,
        arrival: int | None = None,
    ) -> Estimate:
        """What the request would take. `memory_bytes`: by the memory model. `arrival`: when it came; None: now."""
        works = work_of(resolved, text_rows, self.dimensions)
        records = self.records()
        predictions = {stage: predict(records, works[stage]) for stage in WORK_STAGES}
        seconds = [one.seconds for one in predictions.values() if one is not None]
        return Estimate(
            seconds=round(sum(seconds), 3) if len(seconds) == len(works) else None,
            stages={stage: None if one is None else round(one.seconds, 3) for stage, one in predictions.items()},
            basis="; ".join(_basis(works[stage], one) for stage, one in predictions.items()),
            queue=queue,
            # The model that admits requests counts a CPU's memory.
            memory_bytes=None if self._on_gpu else memory_bytes,
            arrival=self._clock() if arrival is None else arrival,
        )

    def means(self, kinds: Iterable[str]) -> dict[str, float]:
        """Seconds of the latest requests of each kind of work that has no size, where there were any."""
        records = self.records()
        found = {kind: predict(records, Work(kind, 1.0)) for kind in kinds}
        return {kind: one.seconds for kind, one in found.items() if one is not None}

    def records(self) -> list[Record]:
        """Those of all processes."""
        files = [] if self._folder is None else sorted(self._folder.glob("*.json"))
        return [record for file in files if (record := timings.read(file, self._identity)) is not None]

    def check(self, resolved: Resolved, estimate: Estimate, stages: Collection[WorkStage] = WORK_STAGES) -> None:
        """Refuses a request that cannot meet its deadline with `stages` still to come.

        Raises RequestError for one that could not meet it on an idle server, and Late for one that is only too late
        now. What is not known takes no time here.
        """
        if resolved.deadline is None:
            return
        whole = sum(one or 0.0 for one in estimate.stages.values())
        if whole > resolved.deadline:
            rule = f"the request takes about {whole:.1f} s on this server"
            raise RequestError("deadline", resolved.deadline, rule, math.floor(whole) + 1)
        rest = sum(estimate.stages[stage] or 0.0 for stage in stages)
        passed = (self._clock() - estimate.arrival) / MICROSECONDS
        ahead = 0.0 if estimate.queue is None else estimate.queue.seconds or 0.0
        if passed + ahead + rest > resolved.deadline:
            reasons = [f"{passed:.1f} s have passed"] if passed > 0.05 else []
            reasons += [f"requests before it take about {ahead:.1f} s"] if ahead else []
            reasons += [f"it takes about {rest:.1f} s"] if rest else []
            raise Late(resolved.deadline, ", ".join(reasons))


def _basis(work: Work, prediction: Prediction | None) -> str:
    if prediction is None:
        return f"{work.kind}: not measured yet"
    requests = "1 request" if prediction.count == 1 else f"{prediction.count} requests"
    return f"{work.kind}: {requests} of {1 / prediction.factor:.2g} times the work"
