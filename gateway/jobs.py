"""The jobs of one gateway: accepted or refused, run, followed, cancelled, kept for a while, drained."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from gateway.active import Active, Stopped
from gateway.clips import Clips
from gateway.clock import Clock
from gateway.database import Database
from gateway.errors import ApiError, Code, of_models
from gateway.job import MEDIA_TYPE, VideoJob, new_id, queued
from gateway.metrics import GatewayMetrics
from gateway.models import Asked, Message, Models
from gateway.settings import HELD_BYTES, JOBS_KEPT, PREPARE_SECONDS, SERVED_MODEL, GatewaySettings
from gateway.store import JobStore, Known
from triton_repo.logs import Log
from triton_repo.messages import ClientError, check_outputs, is_passing

RETRY_SECONDS = 1.0
"""Until a job that has not begun is offered again to a server that is full, because others use it too, or away."""

PATIENCE_SECONDS = 180.0
"""How long that is done: a server that is started again needs less."""

SWEEP_SECONDS = 60.0
LONGEST_RETRY = 3600
EXPECTED_SECONDS = 30.0
"""Of a job, before any has ended."""

_STORAGE = (OSError, sqlite3.Error)
_log = Log("gateway")


@dataclass(frozen=True)
class Drained:
    """What became of the jobs that were there when the gateway was asked to stop."""

    completed: int
    failed: int
    cut: int
    """Of the failed ones, those that the grace time was too short for."""


class Jobs:
    """All jobs, those that run in memory and those that ended in the database."""

    def __init__(
        self,
        models: Models,
        database: Database,
        clips: Clips,
        settings: GatewaySettings,
        clock: Clock,
        metrics: GatewayMetrics,
    ) -> None:
        self._models, self._database, self._clips = models, database, clips
        self._settings, self._clock, self._metrics = settings, clock, metrics
        self._active: dict[str, Active] = {}
        self._unsaved: dict[str, tuple[VideoJob, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reserved = 0
        self._reserved_bytes = 0
        self._mean_seconds = EXPECTED_SECONDS
        self.draining = False
        # A job is stored and counted before draining begins, or refused: there is no between.
        self._door = asyncio.Lock()

    async def recover(self) -> int:
        """Ends what a gateway before this one left unfinished, and clears up after it; the number of such jobs."""
        interrupted = await self._database(JobStore.end_interrupted, self._clock.wall(), self._settings.keep_seconds)
        finished = await self._database(JobStore.finished)
        await asyncio.to_thread(self._clips.keep_only, finished)
        await self.sweep()
        return interrupted

    async def dry_run(self, asked: Asked, job_id: str | None = None) -> Mapping[str, Any]:
        """The request as it would be run, with an estimate of what it takes. Raises ApiError."""
        try:
            resolved = await self._models.resolve(asked, PREPARE_SECONDS, job_id or new_id())
        except ClientError as error:
            raise of_models(error) from None
        self._check_deadline(asked, resolved)
        return resolved

    async def submit(self, asked: Asked, owner: str, key: str | None = None, attached: bool = False) -> VideoJob:
        """Accepts a request as a job, or finds the job that its idempotency key stands for. Raises ApiError.

        attached: the job is to be cancelled when nobody waits for it any more, unless the key also came without this.
        """
        self._check_open()
        fingerprint = await asyncio.to_thread(asked.fingerprint)
        if key is not None and (known := await self._database(JobStore.known, owner, key)) is not None:
            return self._same(known, fingerprint, attached)
        with self._room_for(asked):
            job_id = new_id()
            resolved = await self.dry_run(asked, job_id)
            job = queued(job_id, asked.prompt, SERVED_MODEL, resolved, int(self._clock.wall()))
            async with self._door:
                self._check_open()
                try:
                    known = await self._database(JobStore.add, job, owner, key, fingerprint)
                except sqlite3.Error as error:
                    raise ApiError(Code.STORAGE, f"the job cannot be stored: {error}", retry_after=60) from None
                if known is not None:
                    return self._same(known, fingerprint, attached)
                active = Active(job, asked, resolved, owner, attached, self._clock.monotonic())
                self._active[job.id] = active
        self._metrics.accepted.inc()
        _log.info("accepted", request=job.id)
        self._dispatch()
        return self._seen(active)

    def _check_open(self) -> None:
        if self.draining:
            raise ApiError(Code.DRAINING, "the gateway is stopping and takes no new jobs", retry_after=30)

    async def get(self, job_id: str, owner: str) -> VideoJob:
        """A job as it is now. Raises ApiError."""
        if (active := self._active.get(job_id)) is not None and active.owner == owner:
            return self._seen(active)
        if (unsaved := self._unsaved.get(job_id)) is not None and unsaved[1] == owner:
            return unsaved[0]
        job = await self._database(JobStore.get, job_id, owner)
        if job is None:
            raise no_such_job(job_id)
        return job

    async def page(self, owner: str, after: str | None, limit: int, ascending: bool) -> tuple[list[VideoJob], bool]:
        """At most `limit` jobs in the order of their acceptance, and whether there are more. Raises ApiError."""
        found = await self._database(JobStore.page, owner, after, limit, ascending)
        if found is None:
            raise ApiError(Code.INVALID, f"after: got {after!r}; must be the id of a job that exists", "after")
        jobs, more = found
        return [self._newest(job) for job in jobs], more

    async def delete(self, job_id: str, owner: str) -> None:
        """Cancels a job that has not ended, then removes it and its clips. Raises ApiError."""
        active = self._active.get(job_id)
        if active is not None and active.owner == owner:
            if active.deleting:
                raise ApiError(Code.CONFLICT, f"{job_id} is being cancelled")
            active.deleting = True
            self.stop(active, Code.CANCELLED, "cancelled by its owner")
            await active.ended.wait()
        else:
            await self.get(job_id, owner)
        self._unsaved.pop(job_id, None)
        await self._remove(job_id, "deleted", remember=True)

    def active(self, job_id: str) -> Active | None:
        """The job if it has not ended."""
        return self._active.get(job_id)

    @asynccontextmanager
    async def waiting_for(self, active: Active) -> AsyncIterator[None]:
        """While somebody waits for a job; one that is attached is cancelled when the last one leaves."""
        active.waiters += 1
        try:
            yield
        finally:
            active.waiters -= 1
            if active.attached and not active.waiters:
                self.stop(active, Code.CANCELLED, "the client that waited for it has gone")

    async def drain(self, seconds: float) -> Drained:
        """Takes no more jobs and lets the accepted ones end within that time; those that do not are cancelled."""
        async with self._door:
            self.draining = True
            accepted = list(self._active.values())
        self._metrics.draining.set(1)
        _log.info("draining", jobs=len(accepted))
        await _all_ended(accepted, seconds)
        cut = [one for one in accepted if not one.ended.is_set()]
        for one in cut:
            self.stop(one, Code.DRAINING, f"the gateway stopped, and {seconds:g} s were too short for the job to end")
        await _all_ended(accepted, None)
        completed = sum(one.job.status == "completed" for one in accepted)
        return Drained(completed, len(accepted) - completed, len(cut))

    async def sweep(self) -> None:
        """Removes ended jobs that are too old or too many, and writes down what could not be written before."""
        for job_id, (job, _) in list(self._unsaved.items()):
            with suppress(sqlite3.Error):
                await self._database(JobStore.save, job)
                self._unsaved.pop(job_id, None)
        settings = self._settings
        outdated = await self._database(JobStore.outdated, settings.keep_seconds, settings.keep_bytes, JOBS_KEPT)
        for job_id in outdated:
            await self._remove(job_id, "outdated", remember=False)
        await self._database(JobStore.count_uptime)

    async def sweep_for_ever(self) -> None:
        """Sweeps every minute."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except _STORAGE as error:
                _log.warning("the jobs could not be swept", reason=str(error))

    def retry_after(self) -> int:
        """Whole seconds after which there is probably room for another job: until the first that runs will end."""
        now = self._clock.monotonic()
        running = [one.remaining(now, self._mean_seconds) for one in self._active.values() if one.running]
        return min(max(math.ceil(min(running, default=1.0)), 1), LONGEST_RETRY)

    def _same(self, known: Known, fingerprint: str, attached: bool) -> VideoJob:
        """The job that an idempotency key stands for, if the request is the same."""
        if known.fingerprint != fingerprint:
            raise ApiError(Code.REUSED_KEY, "Idempotency-Key: stands for another request; use a new key for this one")
        if known.job is None:
            raise ApiError(Code.CONFLICT, "Idempotency-Key: its job was deleted; use a new key to make another")
        if not attached and (active := self._active.get(known.job.id)) is not None:
            # Whoever asks without waiting comes back for it.
            active.attached = False
        return self._newest(known.job)

    def _newest(self, job: VideoJob) -> VideoJob:
        """A job of the database as it is now."""
        if (active := self._active.get(job.id)) is not None:
            return self._seen(active)
        return self._unsaved[job.id][0] if job.id in self._unsaved else job

    def _seen(self, active: Active) -> VideoJob:
        waiting = self._waiting()
        return active.seen(waiting.index(active) if active in waiting else None)

    @contextmanager
    def _room_for(self, asked: Asked) -> Iterator[None]:
        """Keeps a place for a job while it is being accepted. Raises ApiError when there is none."""
        held = sum(one.asked.size for one in self._active.values()) + self._reserved_bytes
        full = len(self._active) + self._reserved >= self._settings.queue + self._settings.concurrency
        if full or held + asked.size > HELD_BYTES:
            what = "the files of waiting jobs take all memory for them" if not full else "the queue is full"
            raise ApiError(Code.QUEUE_FULL, what, retry_after=self.retry_after())
        self._reserved += 1
        self._reserved_bytes += asked.size
        try:
            yield
        finally:
            self._reserved -= 1
            self._reserved_bytes -= asked.size

    def _waiting(self) -> list[Active]:
        """The jobs that have not been sent, the next one first."""
        waiting = [one for one in self._active.values() if not one.running and not one.ended.is_set()]
        return sorted(waiting, key=lambda one: one.asked.priority)

    def _check_deadline(self, asked: Asked, resolved: Mapping[str, Any]) -> None:
        """Refuses a request that the jobs waiting here make too late; the server knows of those that it has."""
        deadline, estimate = resolved.get("deadline"), resolved.get("estimate") or {}
        before = [one for one in self._waiting() if one.asked.priority <= asked.priority]
        if deadline is None or not before:
            return
        now = self._clock.monotonic()
        ahead = sum(one.remaining(now, self._mean_seconds) for one in before)
        queue = (estimate.get("queue") or {}).get("seconds") or 0.0
        whole = ahead + queue + (estimate.get("seconds") or 0.0)
        if whole > deadline:
            text = f"deadline: got {deadline:g}; the request would be ready in about {whole:.1f} s, most of it waiting"
            raise ApiError(Code.LATE, text, "deadline", self.retry_after())

    def _dispatch(self) -> None:
        """Sends waiting jobs to the server while it may have more."""
        while (waiting := self._waiting()) and self._at_work() < self._settings.concurrency:
            waiting[0].running = True
            self._spawn(self._run(waiting[0]))
        self._metrics.waiting.set(len(self._waiting()))
        self._metrics.running.set(self._at_work())

    def _at_work(self) -> int:
        return sum(one.running for one in self._active.values())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self, active: Active, code: Code, reason: str) -> None:
        """Tells a job to stop, which it does within one step."""
        if active.stop(code, reason) and not active.running:
            active.running = True
            self._spawn(self._run(active))

    async def _run(self, active: Active) -> None:
        """One job from its turn to its end."""
        size = 0
        try:
            until = self._clock.monotonic() + PATIENCE_SECONDS
            while not await self._generated(active, until):
                await active.pause(RETRY_SECONDS)
            size = await asyncio.to_thread(self._clips.publish, active.job.id)
            ended = self._completed(active)
        except Stopped as stopped:
            ended = active.job.failed(stopped.code, stopped.reason)
        except ClientError as error:
            refused = of_models(error)
            ended = active.job.failed(refused.code, refused.message)
        except OSError as error:
            ended = active.job.failed(Code.STORAGE, f"the clip could not be stored: {error.strerror}")
        except Exception as error:
            _log.error("failed", error, request=active.job.id)
            ended = active.job.failed(Code.INTERNAL, "the gateway failed; its log says why")
        await self._end(active, ended, size)

    async def _generated(self, active: Active, until: float) -> bool:
        """Makes and stores the clips of a job; False when it should be tried again, which is not after `until`.

        Raises Stopped, ClientError, OSError.
        """
        generation = self._models.generate(active.asked, active.resolved, active.job.id)
        try:
            async with aclosing(active.until_stopped(generation)) as messages:
                async for message in messages:
                    await self._take(active, message)
        except ClientError as error:
            if active.started is None and is_passing(error) and self._clock.monotonic() < until:
                return False
            raise
        check_outputs(active.sizes, active.job.outputs)
        return True

    async def _take(self, active: Active, message: Message) -> None:
        now = self._clock.monotonic()
        if active.started is None:
            self._metrics.queued.observe(now - active.accepted)
            active.start(now)
            with suppress(sqlite3.Error):
                await self._database(JobStore.save, active.job)
        if message.event is not None:
            active.see(message.event)
        if message.piece is not None:
            await asyncio.to_thread(self._clips.append, active.job.id, message.index, message.piece)
            self._metrics.bytes.inc(len(message.piece))
            active.grow(message.index, len(message.piece))

    def _completed(self, active: Active) -> VideoJob:
        assert active.started is not None
        changes = {
            "status": "completed",
            "progress": 100,
            "file_name": f"{active.job.id}.mp4",
            "media_type": MEDIA_TYPE,
        }
        return active.job.model_copy(update=changes)

    async def _end(self, active: Active, job: VideoJob, size: int) -> None:
        """Writes down how a job ended, however badly that goes, and makes room for the next one."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        changes = {
            "completed_at": int(wall),
            "expires_at": int(wall + self._settings.keep_seconds),
            "stage_durations": active.progress.stage_durations,
            "inference_time_s": None if active.started is None else round(now - active.started, 3),
            "progress": 100 if job.status == "completed" else active.progress.percent,
        }
        job = await self._saved(job.model_copy(update=changes), active.owner, size)
        if job.status == "completed" and job.inference_time_s is not None:
            self._mean_seconds += 0.3 * (job.inference_time_s - self._mean_seconds)
        active.end(job)
        del self._active[job.id]
        self._metrics.job_ended(job, now - active.accepted)
        code = None if job.error is None else str(job.error.code)
        _log.info("ended", request=job.id, status=job.status, code=code, seconds=round(now - active.accepted, 3))
        self._dispatch()
        if job.status == "completed":
            with suppress(*_STORAGE):
                await self.sweep()

    async def _saved(self, job: VideoJob, owner: str, size: int) -> VideoJob:
        """The job as it could be stored: a clip whose record cannot be is no result."""
        try:
            if job.status != "completed":
                await asyncio.to_thread(self._clips.remove, job.id)
            await self._database(JobStore.save, job, size)
            return job
        except _STORAGE as error:
            _log.warning("the job could not be stored", request=job.id, reason=str(error))
            await asyncio.to_thread(self._clips.remove, job.id)
            if job.status == "completed":
                job = job.failed(Code.STORAGE, f"the job could not be stored: {error}", file_name=None, media_type=None)
            self._unsaved[job.id] = job, owner
            return job

    async def _remove(self, job_id: str, cause: str, remember: bool) -> None:
        """The record first: a clip without one is cleared away at the next start, a record without its clip lies."""
        await self._database(JobStore.remove, job_id, remember)
        await asyncio.to_thread(self._clips.remove, job_id)
        self._metrics.removed.labels(cause).inc()

    async def close(self) -> None:
        """Cancels what still runs and waits for it."""
        for active in list(self._active.values()):
            self.stop(active, Code.RESTARTED, "the gateway was stopped")
        while self._tasks:
            await asyncio.wait(self._tasks)


def no_such_job(job_id: str) -> ApiError:
    """The answer for an id that stands for nothing."""
    return ApiError(Code.NOT_FOUND, f"there is no job {job_id}; it may have been deleted or be too old", "id")


async def _all_ended(jobs: list[Active], seconds: float | None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for one in jobs:
                await one.ended.wait()
