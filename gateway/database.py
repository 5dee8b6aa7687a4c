"""The job store as asynchronous code uses it: one thread of its own, one call after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from gateway.store import JobStore

P = ParamSpec("P")
T = TypeVar("T")


class Database:
    """Runs calls of a JobStore in the thread that it belongs to."""

    def __init__(self, open_store: Callable[[], JobStore]) -> None:
        self._open_store = open_store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")

    async def open(self) -> None:
        """Opens the store. Raises ServerError."""
        self._store = await asyncio.get_running_loop().run_in_executor(self._thread, self._open_store)

    async def close(self) -> None:
        """Closes the store after everything that was asked for."""
        await self(JobStore.close)
        self._thread.shutdown()

    async def __call__(self, call: Callable[Concatenate[JobStore, P], T], *arguments: P.args, **options: P.kwargs) -> T:
        """What a method of the store returns. It runs to its end even if the caller is cancelled meanwhile."""
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: call(self._store, *arguments, **options)
        )
        return await work
