"""What a running request tells the outside (progress events) and hears from it (cancellation)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal, get_args

Stage = Literal["prepare", "encode", "denoise", "decode"]
"""Parts of a request that report progress, in the order in which they run."""


@dataclass(frozen=True)
class Event:
    """One progress report: `index` of `total` units of `stage` are done, `seconds` after the request began.

    Index 0 says that the stage has started. Units are, in `encode`, tiles of conditions, soundtracks, pictures shown to
    the text encoder and its layers; forwards in `denoise`; tiles in `decode`.
    `skipped_tiles`: after an output's last forward, how many tiles of keys attention has left out in all of them; None
    in every other event.
    """

    stage: Stage
    index: int
    total: int
    seconds: float
    skipped_tiles: int | None = None

    def __post_init__(self) -> None:
        """Refuse an event that no progress bar could show; raises ValueError."""
        if self.stage not in get_args(Stage):
            raise ValueError(f"stage: {self.stage!r} is not one of {', '.join(get_args(Stage))}")
        if not 0 <= self.index <= self.total:
            raise ValueError(f"index: {self.index} of stage {self.stage} is outside 0..{self.total}")

    def to_json(self) -> str:
        """The event as one JSON object: stage, index, total, seconds (rounded to a millisecond), what else is told."""
        told = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(told | {"seconds": round(self.seconds, 3)})

    @classmethod
    def from_json(cls, text: str) -> Event:
        """The inverse of `to_json`; raises ValueError on anything else."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a progress event: {text[:200]!r}") from error


def ignore(event: Event) -> None:
    """A sink for events that nobody wants."""


class Reporter:
    """Stamps progress with the time since it was made and hands each event to a sink.

    `clock` returns monotonic seconds and is injected, so that a test needs no waiting.
    """

    def __init__(self, sink: Callable[[Event], None], clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock
        self._start = clock()

    def __call__(self, stage: Stage, index: int, total: int, skipped_tiles: int | None = None) -> None:
        """Send one event, `index` of `total` units of `stage` being done."""
        self._sink(Event(stage, index, total, self._clock() - self._start, skipped_tiles))

    @classmethod
    def silent(cls) -> Reporter:
        """One that tells nobody."""
        return cls(ignore, lambda: 0.0)


class Cancelled(Exception):
    """Raised inside a request at the first unit of work that starts after it was cancelled."""


class Cancellation:
    """A request's cancellation: a flag that any thread may set, or a caller's own check (such as Triton's), or both.

    `check`, if given, is asked each time; once it has said yes the answer stays yes.
    """

    def __init__(self, check: Callable[[], bool] | None = None) -> None:
        self._check = check
        self._flag = threading.Event()

    def cancel(self) -> None:
        """Ask the request to stop; safe from any thread and more than once."""
        self._flag.set()

    @property
    def cancelled(self) -> bool:
        """Whether the request has been asked to stop."""
        if not self._flag.is_set() and self._check is not None and self._check():
            self._flag.set()
        return self._flag.is_set()

    def raise_if_cancelled(self, before: str) -> None:
        """Raise Cancelled, saying what would have run next (`before`), if the request has been asked to stop."""
        if self.cancelled:
            raise Cancelled(f"cancelled before {before}")

    def raise_within(self, before: str) -> None:
        """The same before a part of a unit."""
        self.raise_if_cancelled(before)


class Units:
    """The units of one stage, counted over everything that the stage consists of."""

    def __init__(self, stage: Stage, total: int, report: Reporter, cancellation: Cancellation) -> None:
        """Reports that the stage has begun."""
        self._stage, self.total = stage, total
        self._report, self._cancellation = report, cancellation
        self._finished = 0
        report(stage, 0, total)

    @contextmanager
    def one(self, what: str) -> Iterator[None]:
        """Around one unit: raises Cancelled before it, naming it, if so asked, and reports it when it is done."""
        self._cancellation.raise_if_cancelled(what)
        yield
        self._finished += 1
        self._report(self._stage, self._finished, self.total)

    @contextmanager
    def asking(self, cancellation: Cancellation) -> Iterator[None]:
        """Within it, units ask this cancellation instead."""
        before, self._cancellation = self._cancellation, cancellation
        try:
            yield
        finally:
            self._cancellation = before

    def reach(self, count: int) -> None:
        """Counts units as done that need not be: so many are done at least."""
        if count > self._finished:
            self._finished = count
            self._report(self._stage, count, self.total)

    def tell_skipped(self, tiles: int) -> None:
        """Reports how many tiles of keys attention has left out, beside what is done."""
        self._report(self._stage, self._finished, self.total, tiles)

    def check(self, what: str) -> None:
        """Raises Cancelled before a part of a unit, naming it, if the request has been asked to stop."""
        self._cancellation.raise_within(what)
