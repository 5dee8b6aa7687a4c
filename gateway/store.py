"""The jobs in one SQLite file. Order is by a sequence number and age by counted uptime: wall clocks jump."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.clock import Clock
from gateway.errors import Code
from gateway.job import VideoJob
from triton_repo.errors import ServerError

VERSION = 1
_SCHEMA = """
CREATE TABLE jobs (
  sequence INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  owner TEXT NOT NULL,
  status TEXT NOT NULL,
  idempotency_key TEXT,
  fingerprint TEXT NOT NULL,
  bytes INTEGER NOT NULL DEFAULT 0,
  ended_at REAL,
  record TEXT NOT NULL,
  UNIQUE (owner, idempotency_key)
) STRICT;
CREATE TABLE uptime (seconds REAL NOT NULL) STRICT;
INSERT INTO uptime VALUES (0.0);
"""

DELETED = "deleted"
"""The status of a row that only keeps an idempotency key from making its job a second time."""

INTERRUPTED = "the gateway ended while the job was {status}; send the request again"


@dataclass(frozen=True)
class Known:
    """The job that an idempotency key already stands for; None when it was deleted. fingerprint: of its request."""

    job: VideoJob | None
    fingerprint: str


class JobStore:
    """All calls block and belong to one thread. They raise sqlite3.Error, for example when the disk is full."""

    FILE = "jobs.sqlite"

    def __init__(self, file: Path, clock: Clock) -> None:
        """Opens the file, made where it is missing. Raises ServerError for one that is no such database."""
        self._clock = clock
        self._started = clock.monotonic()
        try:
            self._db = self._open(file)
        except sqlite3.DatabaseError as error:
            raise ServerError(f"{file} is damaged: {error}", _move_away(file, "damaged")) from error
        (self._counted,) = self._db.execute("SELECT seconds FROM uptime").fetchone()

    def close(self) -> None:
        """Writes everything and closes the file."""
        self.count_uptime()
        self._db.close()

    @property
    def uptime(self) -> float:
        """Seconds that gateways have run on this file, which no clock moves back."""
        return self._counted + self._clock.monotonic() - self._started

    def count_uptime(self) -> None:
        """Writes the uptime down; a crash loses what came after."""
        with self._transaction():
            self._db.execute("UPDATE uptime SET seconds = ?", (self.uptime,))

    def end_interrupted(self, wall: float, keep_seconds: float) -> int:
        """Marks the jobs that a gateway before this one left unfinished as failed; how many."""
        rows = self._db.execute("SELECT record FROM jobs WHERE status IN ('queued', 'in_progress')").fetchall()
        for (record,) in rows:
            job = VideoJob.model_validate_json(record)
            text = INTERRUPTED.format(status=job.status.replace("_", " "))
            times = {"completed_at": int(wall), "expires_at": int(wall + keep_seconds), "queue_position": None}
            self.save(job.failed(Code.RESTARTED, text, **times))
        return len(rows)

    def known(self, owner: str, key: str) -> Known | None:
        """What an idempotency key stands for."""
        query = "SELECT status, fingerprint, record FROM jobs WHERE owner = ? AND idempotency_key = ?"
        row = self._db.execute(query, (owner, key)).fetchone()
        if row is None:
            return None
        status, fingerprint, record = row
        return Known(None if status == DELETED else VideoJob.model_validate_json(record), fingerprint)

    def add(self, job: VideoJob, owner: str, key: str | None, fingerprint: str) -> Known | None:
        """Adds a job, unless its idempotency key already stands for one, which is then the answer."""
        with self._transaction():
            if key is not None and (found := self.known(owner, key)) is not None:
                return found
            values = (job.id, owner, job.status, key, fingerprint, job.model_dump_json())
            query = "INSERT INTO jobs (id, owner, status, idempotency_key, fingerprint, record) VALUES (?,?,?,?,?,?)"
            self._db.execute(query, values)
        return None

    def save(self, job: VideoJob, size: int = 0) -> None:
        """Writes a job's new state. size: bytes of its clips."""
        ended = self.uptime if job.ended else None
        with self._transaction():
            query = "UPDATE jobs SET status = ?, record = ?, bytes = ?, ended_at = ? WHERE id = ? AND status != ?"
            self._db.execute(query, (job.status, job.model_dump_json(), size, ended, job.id, DELETED))

    def get(self, job_id: str, owner: str) -> VideoJob | None:
        """One job of an owner."""
        query = "SELECT record FROM jobs WHERE id = ? AND owner = ? AND status != ?"
        row = self._db.execute(query, (job_id, owner, DELETED)).fetchone()
        return None if row is None else VideoJob.model_validate_json(row[0])

    def page(self, owner: str, after: str | None, limit: int, ascending: bool) -> tuple[list[VideoJob], bool] | None:
        """At most `limit` jobs after that one, and whether there are more; None when there is no such one."""
        start: int | None = None
        if after is not None:
            query = "SELECT sequence FROM jobs WHERE id = ? AND owner = ? AND status != ?"
            row = self._db.execute(query, (after, owner, DELETED)).fetchone()
            if row is None:
                return None
            (start,) = row
        sign, order = (">", "ASC") if ascending else ("<", "DESC")
        query = (
            f"SELECT record FROM jobs WHERE owner = ? AND status != ? AND (? IS NULL OR sequence {sign} ?)"  # noqa: S608
            f" ORDER BY sequence {order} LIMIT ?"
        )
        rows = self._db.execute(query, (owner, DELETED, start, start, limit + 1)).fetchall()
        return [VideoJob.model_validate_json(record) for (record,) in rows[:limit]], len(rows) > limit

    def remove(self, job_id: str, remember: bool = True) -> None:
        """Forgets a job; with `remember` its idempotency key stays known until the job would have been too old."""
        with self._transaction():
            if remember:
                query = (
                    "UPDATE jobs SET status = ?, record = '{}', bytes = 0, ended_at = ?"
                    " WHERE id = ? AND idempotency_key IS NOT NULL"
                )
                self._db.execute(query, (DELETED, self.uptime, job_id))
            self._db.execute("DELETE FROM jobs WHERE id = ? AND (? OR status != ?)", (job_id, not remember, DELETED))

    def outdated(self, keep_seconds: float, keep_bytes: int, keep_jobs: int) -> list[str]:
        """The ended jobs that are too old or one too many, or whose clips are too much; never the newest one."""
        query = "SELECT id, bytes, ended_at FROM jobs WHERE ended_at IS NOT NULL ORDER BY ended_at DESC, sequence DESC"
        found, total = [], 0
        for place, (job_id, size, ended_at) in enumerate(self._db.execute(query)):
            total += size
            too_old = ended_at <= self.uptime - keep_seconds
            if too_old or (place > 0 and (total > keep_bytes or place >= keep_jobs)):
                found.append(job_id)
        return found

    def finished(self) -> set[str]:
        """The jobs that have clips."""
        return {job_id for (job_id,) in self._db.execute("SELECT id FROM jobs WHERE status = 'completed'")}

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing; inside another one it is a part of that."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk has ended it already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _open(self, file: Path) -> sqlite3.Connection:
        # Transactions are ours; durable as soon as they end, so that an accepted job is never forgotten.
        db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found == 0:
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        elif found != VERSION:
            db.close()
            what = f"{file} has version {found} of the jobs' schema and this gateway reads {VERSION}"
            raise ServerError(what, _move_away(file, f"version{found}"))
        return db


def _move_away(file: Path, why: str) -> str:
    """The whole folder: SQLite's other files and the clips belong to the jobs."""
    return f"move its folder away: mv {file.parent} {file.parent}.{why}"
