"""A job that has not ended, and what is only known meanwhile: its progress, who waits for it, whether it must stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from gateway.errors import Code
from gateway.job import VideoJob
from gateway.models import Asked, Message
from gateway.progress import EventLog, Progress


class Stopped(Exception):
    """A job was told to stop before it was done."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Active:
    """One job. `accepted` and `started` are monotonic seconds; `running`: it has left the gateway's queue.

    resolved: the request as `h3_prepare` resolved it. attached: the job is to be cancelled when nobody waits for it.
    deleting: somebody is about to remove it.
    """

    def __init__(
        self, job: VideoJob, asked: Asked, resolved: Mapping[str, Any], owner: str, attached: bool, accepted: float
    ) -> None:
        self.job, self.asked, self.resolved, self.owner = job, asked, resolved, owner
        self.attached, self.accepted = attached, accepted
        self.started: float | None = None
        self.running = False
        self.deleting = False
        self.waiters = 0
        self.progress = Progress(job.outputs)
        self.log = EventLog()
        self.ended = asyncio.Event()
        self.sizes: dict[int, int] = {}
        self._grown = asyncio.Event()
        self._stop = asyncio.Event()
        self._why: Stopped | None = None

    def seen(self, position: int | None) -> VideoJob:
        """The record as it is now. position: how many jobs wait before it, None if it does not wait."""
        if self.job.ended:
            return self.job
        return self.job.model_copy(update={"progress": self.progress.percent, "queue_position": position})

    def start(self, now: float) -> None:
        """The model has said its first word."""
        self.started = now
        self.job = self.job.model_copy(update={"status": "in_progress"})
        self._tell_status()

    def see(self, event: Mapping[str, Any]) -> None:
        """Takes a progress event of the model."""
        self.progress.see(event)
        self.log.add("progress", {**event, "progress": self.progress.percent})

    def end(self, job: VideoJob) -> None:
        """Nothing more will happen to it."""
        self.job = job
        self._tell_status(last=True)
        self.ended.set()
        self._grown.set()

    @property
    def streamed(self) -> bool:
        """Whether its clips can be read while they are made."""
        return self.resolved.get("media", {}).get("container") == "fragmented"

    def grow(self, index: int, size: int) -> None:
        """An output has so many bytes more."""
        self.sizes[index] = self.sizes.get(index, 0) + size
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def beyond(self, index: int, offset: int) -> int:
        """The bytes of an output once it has more than `offset` or the job has ended."""
        while self.sizes.get(index, 0) <= offset and not self.ended.is_set():
            await self._grown.wait()
        return self.sizes.get(index, 0)

    def stop(self, code: Code, reason: str) -> bool:
        """Tells the job to stop; whether it had not been told before and has not ended."""
        if self._stop.is_set() or self.ended.is_set():
            return False
        self._why = Stopped(code, reason)
        self._stop.set()
        return True

    async def pause(self, seconds: float) -> None:
        """Waits. Raises Stopped."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        self._raise_if_stopped()

    async def until_stopped(self, messages: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """The messages, unless the job is told to stop, which cancels what makes them. Raises Stopped.

        Only the wait for the next message is broken off, so that nothing is left half written.
        """
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            while True:
                self._raise_if_stopped()
                following = asyncio.ensure_future(anext(messages, None))
                await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
                    continue
                message = following.result()
                if message is None:
                    return
                yield message
        finally:
            stopped.cancel()
            if isinstance(messages, AsyncGenerator):
                await messages.aclose()

    def remaining(self, now: float, expected: float) -> float:
        """Seconds until it will probably end: by what it has done so far, else by what the server expects of it.

        expected: of any job, where the server expects nothing.
        """
        if self.started is None or self.progress.percent < 5:
            return expected if self.job.estimate_s is None else self.job.estimate_s
        elapsed = now - self.started
        return elapsed * (100 - self.progress.percent) / self.progress.percent

    def _tell_status(self, last: bool = False) -> None:
        self.log.add("status", self.seen(None).model_dump(mode="json"), last)

    def _raise_if_stopped(self) -> None:
        if self._why is not None:
            raise self._why
