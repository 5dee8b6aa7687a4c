"""What stages have taken on this server, by kind and amount of work, and what that says of a request to come.

Every process that runs stages keeps a small file of its own; whoever estimates reads all of them. A record is of one
set of engines: under another `identity` it begins anew.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from engines.store import Manifest, write_atomically
from runtime.work import Work

WEIGHT = 0.3
"""Of the newest request in an average, so that a server that has become slower is soon believed to be."""

RESOLUTION = 2
"""Averages for each doubling of the amount of work; what lies closer is one average."""


class Average(BaseModel):
    """Exponentially weighted averages of `count` requests of about one amount of work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    amount: float
    seconds: float
    count: int

    def followed_by(self, amount: float, seconds: float) -> Average:
        """With a newer request."""
        return Average(
            amount=self.amount + WEIGHT * (amount - self.amount),
            seconds=self.seconds + WEIGHT * (seconds - self.seconds),
            count=self.count + 1,
        )


class Record(BaseModel):
    """The averages of one process: by kind of work, and by the amount's place on a logarithmic scale."""

    model_config = ConfigDict(extra="forbid")

    identity: str
    averages: dict[str, dict[int, Average]] = {}

    def add(self, work: Work, seconds: float) -> None:
        """Counts a piece of work that is done."""
        places = self.averages.setdefault(work.kind, {})
        place = math.floor(RESOLUTION * math.log2(max(1.0, work.amount)))
        before = places.get(place)
        first = Average(amount=work.amount, seconds=seconds, count=1)
        places[place] = first if before is None else before.followed_by(work.amount, seconds)


@dataclass(frozen=True)
class Prediction:
    """Seconds that work will take, from `count` requests of `factor` times less work (below 1: of more)."""

    seconds: float
    count: int
    factor: float


def predict(records: Iterable[Record], work: Work) -> Prediction | None:
    """By the averages nearest in amount; None where work of the kind has not been measured."""
    found = [average for record in records for average in record.averages.get(work.kind, {}).values()]
    found = [average for average in found if average.amount > 0]
    if not found or work.amount <= 0:
        return None
    nearest = min(found, key=lambda average: (abs(math.log(work.amount / average.amount)), -average.count))
    factor = work.amount / nearest.amount
    return Prediction(nearest.seconds * factor, nearest.count, factor)


@dataclass
class Recorder:
    """Keeps one process's record in a file."""

    file: Path
    identity: str
    _record: Record = field(init=False)

    def __post_init__(self) -> None:
        """Goes on with what the file says of the same engines."""
        self._record = read(self.file, self.identity) or Record(identity=self.identity)

    def add(self, done: Mapping[Work, float]) -> None:
        """Counts work that is done, with its seconds."""
        for work, seconds in done.items():
            self._record.add(work, seconds)
        write_atomically(self.file, self._record.model_dump_json().encode())


def read(file: Path, identity: str) -> Record | None:
    """The record of a file; None where there is none, none that can be read, or one of other engines."""
    try:
        record = Record.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
    return record if record.identity == identity else None


def identity(manifest: Manifest) -> str:
    """What tells the engines of a store, and the profile they run under, from others."""
    engines = {graph: engine.key for graph, engine in sorted(manifest.graphs.items())}
    told = json.dumps([manifest.profile.name, manifest.checkpoint.fingerprint, engines])
    return hashlib.sha256(told.encode()).hexdigest()
