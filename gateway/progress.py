"""How far a running job is: a percentage, the seconds of each stage, and the numbered events that clients follow."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

EVENTS_KEPT = 1024
"""Of one job; a client that comes back after more than these continues with the oldest that is left."""

LAST_ID = "end"
"""The id of a job's last event; who has seen it has seen all."""

_SHARES = {"encode": (0, 5), "denoise": (5, 85), "decode": (85, 99)}
"""The part of the percentage that each stage moves; 100 is for a finished job."""


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    number: int
    name: str
    data: str
    last: bool = False

    def encode(self) -> bytes:
        """As it goes over the wire; `data` has no line break."""
        return f"id: {LAST_ID if self.last else self.number}\nevent: {self.name}\ndata: {self.data}\n\n".encode()


class EventLog:
    """The events of one job, numbered from 1, of which the last ones are kept."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._number = 0
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, name: str, data: Mapping[str, Any], last: bool = False) -> None:
        """Appends an event and wakes those who follow; nothing comes after the last one."""
        self._number += 1
        self._ended = last
        self._events.append(Event(self._number, name, json.dumps(data), last))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """The events with a number above `after`, those to come too, until the last."""
        while True:
            changed = self._changed
            for event in [one for one in self._events if one.number > after]:
                after = event.number
                yield event
            if self._ended and after >= self._number:
                return
            if changed is self._changed:
                await changed.wait()


class Progress:
    """Follows the events of `h3_stream`. Stages repeat where a job has several outputs."""

    def __init__(self, outputs: int) -> None:
        self._outputs = outputs
        self._decoded = 0
        self._tiles = 0
        self._seconds: dict[str, float] = {}
        self._entered: tuple[str, float] | None = None
        self.percent = 0

    def see(self, event: Mapping[str, Any]) -> None:
        """Takes an event: stage, index, total, and seconds since the request began."""
        stage = event["stage"]
        if self._entered is not None:
            name, since = self._entered
            self._seconds[name] = self._seconds.get(name, 0.0) + event["seconds"] - since
        self._entered = stage, event["seconds"]
        low, high = _SHARES.get(stage, (0, 0))
        part = event["index"] / max(event["total"], 1)
        if stage == "decode":
            # Each output counts its tiles from the beginning.
            self._decoded += event["index"] < self._tiles
            self._tiles = event["index"]
            part = (self._decoded + part) / self._outputs
        self.percent = max(self.percent, min(99, int(low + part * (high - low))))

    @property
    def stage_durations(self) -> dict[str, float]:
        """Seconds of each stage so far."""
        return {stage: round(seconds, 3) for stage, seconds in self._seconds.items()}
