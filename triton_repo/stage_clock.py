"""How long a request is in each stage, told by when its progress events come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from runtime.events import Event, Stage


class StageClock:
    """Takes a request's events as they come. `seconds` and `units` are by stage.

    The time between two events is the stage's of the later one; what passes before a stage's first event, index 0, is
    still the stage's before. A request begins in `prepare`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self.seconds: defaultdict[Stage, float] = defaultdict(float)
        self.units: defaultdict[Stage, int] = defaultdict(int)
        self._clock = clock
        self._moment = clock()
        self._stage: Stage = "prepare"
        self._index = 0

    def __call__(self, event: Event) -> tuple[int, float]:
        """Counts an event; the units of its stage that are new, and the seconds since the event before."""
        # An event may say more of what is done, and the next output begins anew.
        continues = event.stage == self._stage and event.index >= self._index
        units = event.index - self._index if continues else event.index
        passed = self._spend(event.stage if event.index else self._stage)
        self._stage, self._index = event.stage, event.index
        self.units[event.stage] += units
        return units, passed

    def finish(self) -> float:
        """Counts what came after the last event to its stage; the seconds of all stages."""
        self._spend(self._stage)
        return sum(self.seconds.values())

    def _spend(self, stage: Stage) -> float:
        now = self._clock()
        passed, self._moment = now - self._moment, now
        self.seconds[stage] += passed
        return passed
