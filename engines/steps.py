"""A build as a list of steps, each redone only when something it depends on has changed.

A step's key covers what it declares to depend on and the records of the steps it requires. Its record (key, facts,
files) is kept next to its log; while the key is the same and the files are intact, the result is reused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from engines.store import FileRecord, write_atomically

Facts = Mapping[str, Any]
"""What a step found out, as JSON values."""

Status = Literal["built", "reused", "failed"]

RECORDS = "build"
"""Directory of the records and logs of a build, in the store."""


@dataclass(frozen=True)
class Product:
    """A step's result: what it found out, and the files it made, by path relative to the store.

    `{sha}` in a path becomes the hash of the bytes, so that a new file never replaces one that a manifest names.
    """

    facts: Facts = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


class Record(BaseModel):
    """A finished step: the key it was done under, its facts, and its files in the order they were produced."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    facts: dict[str, Any]
    files: tuple[FileRecord, ...]


@dataclass(frozen=True)
class Step:
    """One piece of work: `action` is given the records of the steps in `requires`, which come earlier in the list."""

    name: str
    depends_on: Facts
    action: Callable[[Mapping[str, Record]], Product]
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepEvent:
    """Progress: step `index` of `total` (from 1) starts, or has ended with a status after `seconds`."""

    index: int
    total: int
    name: str
    status: Literal["started", "built", "reused", "failed"]
    seconds: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """How a step ended: `log` is its log file, `reproduce` the command that does this step alone."""

    name: str
    status: Status
    seconds: float
    log: Path
    reproduce: str
    facts: Facts


class StepFailed(RuntimeError):
    """A step did not succeed; `report` says which. Everything built before it stays as it is."""

    def __init__(self, report: StepReport, cause: Exception) -> None:
        super().__init__(f"step {report.name} failed: {cause}\nlog: {report.log}\nto run it alone: {report.reproduce}")
        self.report = report


class Ledger:
    """Runs steps in a store and remembers their results there. `reproduce` gives the command for a step's name."""

    def __init__(self, root: Path, reproduce: Callable[[str], str], progress: Callable[[StepEvent], None]) -> None:
        self._root = root
        self._reproduce = reproduce
        self._progress = progress

    def run(self, steps: list[Step], only: str | None = None) -> list[StepReport]:
        """Runs the steps in order; with `only`, up to that step, which is done even if nothing has changed.

        Raises:
            StepFailed: a step failed; the later ones have not been started.
        """
        records: dict[str, Record] = {}
        reports = []
        for index, step in enumerate(steps, start=1):
            self._progress(StepEvent(index, len(steps), step.name, "started"))
            try:
                report, records[step.name] = self._run(step, records, force=step.name == only)
            except StepFailed as failure:
                self._progress(StepEvent(index, len(steps), step.name, "failed", failure.report.seconds))
                raise
            reports.append(report)
            self._progress(StepEvent(index, len(steps), step.name, report.status, report.seconds))
            if step.name == only:
                break
        return reports

    def prune(self, steps: Iterable[Step], directories: Iterable[str]) -> None:
        """Removes the records of steps that are no more, and the files in `directories` that no record names."""
        names = {step.name for step in steps}
        kept: set[Path] = set()
        for path in sorted((self._root / RECORDS).glob("*.json")):
            record = _load(path)
            if path.stem in names and record is not None:
                kept |= {self._root / file.path for file in record.files}
            else:
                path.unlink()
                self._log_file(path.stem).unlink(missing_ok=True)
        for directory in directories:
            _remove_except(self._root / directory, kept)

    def _run(self, step: Step, records: Mapping[str, Record], force: bool) -> tuple[StepReport, Record]:
        started = time.monotonic()
        required = {name: records[name] for name in step.requires}
        key = content_key(step.depends_on, {name: record.model_dump() for name, record in required.items()})
        record = None if force else self._intact(step.name, key)
        status: Status = "reused" if record else "built"
        try:
            record = record or self._build(step, key, required)
        except Exception as error:
            raise StepFailed(self._report(step.name, "failed", started, {}), error) from error
        return self._report(step.name, status, started, record.facts), record

    def _build(self, step: Step, key: str, required: Mapping[str, Record]) -> Record:
        with _logged(self._log_file(step.name), f"{step.name}, key {key}"):
            product = step.action(required)
            files = tuple(self._write(path, data) for path, data in product.files.items())
            record = Record(key=key, facts=json.loads(json.dumps(product.facts)), files=files)
        write_atomically(self._record_file(step.name), record.model_dump_json(indent=1).encode())
        return record

    def _write(self, path: str, data: bytes) -> FileRecord:
        digest = hashlib.sha256(data).hexdigest()
        record = FileRecord(path=path.format(sha=digest[:16]), sha256=digest)
        write_atomically(self._root / record.path, data)
        return record

    def _intact(self, name: str, key: str) -> Record | None:
        """The step's record, if it was done under this key and its files are what it wrote."""
        record = _load(self._record_file(name))
        if record is None or record.key != key:
            return None
        return record if all(_holds(self._root / file.path, file.sha256) for file in record.files) else None

    def _report(self, name: str, status: Status, started: float, facts: Facts) -> StepReport:
        seconds = time.monotonic() - started
        return StepReport(name, status, seconds, self._log_file(name), self._reproduce(name), facts)

    def _record_file(self, name: str) -> Path:
        return self._root / RECORDS / f"{name}.json"

    def _log_file(self, name: str) -> Path:
        return self._root / RECORDS / f"{name}.log"


def content_key(*parts: object) -> str:
    """SHA-256 of the parts as canonical JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _load(path: Path) -> Record | None:
    try:
        return Record.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        return None


def _holds(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def _remove_except(directory: Path, kept: set[Path]) -> None:
    """Removes the other files below, and directories that this leaves empty."""
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in kept:
            path.unlink()


@contextmanager
def _logged(path: Path, title: str) -> Iterator[None]:
    """Writes a step's log: its title, what is logged meanwhile, and the traceback if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        try:
            file.write(f"{title}\n")
            yield
            file.write("done\n")
        except Exception:
            file.write(f"failed\n{traceback.format_exc()}")
            raise
        finally:
            logging.getLogger().removeHandler(handler)
