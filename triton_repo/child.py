"""A child process that outlives neither its parent nor a clean stop, together with all of its own children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO

import psutil

from engines.machine import DieWith

POLL_SECONDS = 0.1


class Child:
    """A running program in a session of its own.

    The kernel kills it when the thread that started it ends, so start it from a thread that lives as long as it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own argument list, no shell
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Its own group: Ctrl-C in a terminal reaches the parent alone, which then stops the child in order.
            start_new_session=True,
            preexec_fn=DieWith(os.getpid()),
        )
        self.pid = self._process.pid

    def exited(self) -> bool:
        """Whether the program has ended; it is left unreaped, so that its group id stays taken."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def children(self) -> list[psutil.Process]:
        """The program's own child processes."""
        return psutil.Process(self.pid).children()

    def stop(self, patience: float) -> None:
        """SIGTERM, then SIGKILL after `patience` seconds or at the next signal, to the program and all its children."""
        # Once it is reaped its id, and its group's, may be another's.
        if self._process.returncode is not None:
            return
        with _signals_deferred() as deferred:
            if not self.exited():
                self._process.terminate()
            deadline = time.monotonic() + patience
            while not self.exited() and time.monotonic() < deadline and not deferred.count:
                time.sleep(POLL_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()


@dataclass
class _Deferred:
    """Counts the signals that arrived while they were deferred."""

    count: int = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


@contextmanager
def _signals_deferred() -> Iterator[_Deferred]:
    """Keep signals from cutting a clean-up short; outside the main thread Python has no handlers to change."""
    deferred = _Deferred()
    previous = {}
    with suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous[number] = signal.signal(number, deferred)
    try:
        yield deferred
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
