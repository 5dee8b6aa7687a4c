"""A build as a list of steps, each redone only when something it depends on has changed.

A step's key covers what it declares to depend on and the records of the steps it requires. Its record (keys, facts,
files) is kept next to its log; while the key is the same and the files are intact, the result is reused. What cannot be
done on this machine is put off, with all that waits for it, to be done on another one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from engines.store import FileRecord, file_sha256, write_atomically

Facts = Mapping[str, Any]
"""What a step found out, as JSON values."""

Status = Literal["built", "reused", "deferred", "failed"]

RECORDS = "build"
"""Directory of the records and logs of a build, in the store."""


@dataclass(frozen=True)
class Product:
    """A step's result: what it found out, and the files it made, by path relative to the store.

    A file is its bytes, or the path of a finished one on the store's disk, which is moved. `{sha}` in a path becomes
    the hash of the bytes, so that a new file never replaces one that a manifest names.
    """

    facts: Facts = field(default_factory=dict)
    files: Mapping[str, bytes | Path] = field(default_factory=dict)


class Deferred(Exception):
    """Raised by a step that this machine cannot do; the text says why, and what it needs."""


class Record(BaseModel):
    """A finished step: the key it was done under, its facts, and its files in the order they were produced.

    `portable_key` is the part of the key that is the same on every machine; None where the result is not. `seal` is the
    hash of the rest: a record that was damaged is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    portable_key: str | None
    facts: dict[str, Any]
    files: tuple[FileRecord, ...]
    seal: str

    @staticmethod
    def sealed(keys: _Keys, facts: Facts, files: tuple[FileRecord, ...]) -> Record:
        """The record of a step that has just been done; its facts are taken as JSON has them."""
        kept = json.loads(json.dumps(facts))
        return Record(**keys._asdict(), facts=kept, files=files, seal=_seal(keys, kept, files))

    @property
    def intact(self) -> bool:
        """Whether it says what it said when it was made."""
        return self.seal == _seal(_Keys(self.key, self.portable_key), self.facts, self.files)


@dataclass(frozen=True)
class Step:
    """One piece of work: `action` is given the records of the steps in `requires`, which come earlier in the list.

    A step with `here` is portable: `here` is what it depends on besides and what differs from machine to machine, such
    as versions of libraries and times of files, while the result says the same on all that go on with the store.
    """

    name: str
    depends_on: Facts
    action: Callable[[Mapping[str, Record]], Product]
    requires: tuple[str, ...] = ()
    here: Facts | None = None


class _Keys(NamedTuple):
    """What a step's record was, or would be, done under."""

    key: str
    portable_key: str | None

    @staticmethod
    def of(step: Step, required: Mapping[str, Record]) -> _Keys:
        records = {name: record.model_dump() for name, record in required.items()}
        if step.here is None:
            return _Keys(content_key(step.depends_on, records), None)
        return _Keys(content_key(step.depends_on, records, step.here), content_key(step.depends_on, records))


@dataclass(frozen=True)
class StepEvent:
    """Progress: step `index` of `total` (from 1) starts, or has ended with a status after `seconds`.

    While it is "working", index and total are those of a part of it, which the name tells.
    """

    index: int
    total: int
    name: str
    status: Literal["started", "working"] | Status
    seconds: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """How a step ended: `log` is its log file, `reproduce` the command that does this step alone.

    The facts of a step that was put off have its reason under "deferred".
    """

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


class Work(Protocol):
    """What a running step has of its ledger."""

    def directory(self, step: str) -> Path:
        """A directory on the store's disk, for files that the step hands over; removed when it ends."""

    def report(self, step: str, part: str, done: int, total: int) -> None:
        """Shows how much of a part of the step is done."""


class _Work:
    """The working directories of a store, and who is told of progress."""

    def __init__(self, root: Path, progress: Callable[[StepEvent], None]) -> None:
        self._root = root
        self._progress = progress

    def directory(self, step: str) -> Path:
        path = self._root / RECORDS / f"{step}.work"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def report(self, step: str, part: str, done: int, total: int) -> None:
        self._progress(StepEvent(done, total, f"{step}: {part}", "working"))

    def clear(self, step: str) -> None:
        shutil.rmtree(self._root / RECORDS / f"{step}.work", ignore_errors=True)


class Ledger:
    """Runs steps in a store and remembers their results there. `reproduce` gives the command for a step's name.

    A ledger that `resumes` takes finished portable steps as they are, whatever they were done under on the machine that
    has done them: their results are those that the remaining steps want.
    """

    def __init__(
        self,
        root: Path,
        reproduce: Callable[[str], str],
        progress: Callable[[StepEvent], None],
        resumes: bool = False,
    ) -> None:
        self._root = root
        self._reproduce = reproduce
        self._progress = progress
        self._resumes = resumes
        self._work = _Work(root, progress)

    @property
    def work(self) -> Work:
        """What steps that take long or write large files are given when they are made."""
        return self._work

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
                report, record = self._run(step, records, force=step.name == only)
            except StepFailed as failure:
                self._progress(StepEvent(index, len(steps), step.name, "failed", failure.report.seconds))
                raise
            if record is not None:
                records[step.name] = record
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

    def _run(self, step: Step, records: Mapping[str, Record], force: bool) -> tuple[StepReport, Record | None]:
        started = time.monotonic()
        waiting = [name for name in step.requires if name not in records]
        if waiting:
            reason = {"deferred": f"waits for {waiting[0]}"}
            return self._report(step.name, "deferred", started, reason), None
        required = {name: records[name] for name in step.requires}
        keys = _Keys.of(step, required)
        record = None if force else self._intact(step, keys)
        status: Status = "reused" if record else "built"
        try:
            record = record or self._build(step, keys, required)
        except Deferred as reason:
            return self._report(step.name, "deferred", started, {"deferred": str(reason)}), None
        except Exception as error:
            raise StepFailed(self._report(step.name, "failed", started, {}), error) from error
        finally:
            self._work.clear(step.name)
        return self._report(step.name, status, started, record.facts), record

    def _build(self, step: Step, keys: _Keys, required: Mapping[str, Record]) -> Record:
        with _logged(self._log_file(step.name), f"{step.name}, key {keys.key}"):
            product = step.action(required)
            files = tuple(self._write(path, data) for path, data in product.files.items())
            record = Record.sealed(keys, product.facts, files)
        write_atomically(self._record_file(step.name), record.model_dump_json(indent=1).encode())
        return record

    def _write(self, path: str, content: bytes | Path) -> FileRecord:
        digest = file_sha256(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()
        record = FileRecord(path=path.format(sha=digest[:16]), sha256=digest)
        target = self._root / record.path
        if isinstance(content, Path):
            target.parent.mkdir(parents=True, exist_ok=True)
            content.replace(target)
        else:
            write_atomically(target, content)
        return record

    def _intact(self, step: Step, keys: _Keys) -> Record | None:
        """The step's record, if it was done under these keys and its files are what it wrote."""
        record = _load(self._record_file(step.name))
        if record is None:
            return None
        moved = self._resumes and step.here is not None and record.portable_key == keys.portable_key
        if record.key != keys.key and not moved:
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


def _seal(keys: _Keys, facts: Facts, files: Iterable[FileRecord]) -> str:
    return content_key(*keys, facts, [file.model_dump() for file in files])


def _load(path: Path) -> Record | None:
    try:
        record = Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return record if record.intact else None


def _holds(path: Path, sha256: str) -> bool:
    return path.is_file() and file_sha256(path) == sha256


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
