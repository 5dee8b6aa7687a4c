"""A group of ranks: the processes that serve one request together, watched, ended together and started anew.

The group lives in the process that requests come to, which runs no engine. Commands go to rank 0, which tells the
others; the group hears from each rank that this machine has. Imports no torch.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any

from runtime.events import Cancellation, Cancelled
from runtime.frames import Frame
from runtime.rank_errors import NOT_STARTED, GroupError, RankLost
from runtime.rank_place import Meeting, Place
from runtime.rank_process import POLL_SECONDS, RankProcess

DEFAULT_STALL_SECONDS = 600.0
"""Less than what a server's watchdog waits, which starts all of it again."""

CLOSED = "the group has been closed"


@dataclass(frozen=True)
class GroupSettings:
    """What a group is.

    program: Python's arguments for every rank. size: ranks on all machines. threads: of torch in each, 0: its choice.
    stall: seconds without a sign of life from a rank, or without a step of any while there is a command, after which
    the group is lost. The n-th start in a row waits for first_delay * 2^(n-1) seconds, at most longest_delay; a group
    that was ready for `steady` seconds begins a new row.
    """

    program: tuple[str, ...]
    size: int
    meeting: Meeting = field(default_factory=Meeting)
    threads: int = 0
    stall: float = DEFAULT_STALL_SECONDS
    first_delay: float = 1.0
    longest_delay: float = 60.0
    steady: float = 60.0
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        """Raises GroupError for more ranks here than there are in all."""
        if not 1 <= self.local <= self.size:
            rule = f"must be from 1 to {self.size}, the ranks of the group"
            raise GroupError(f"LOCAL_WORLD_SIZE: got {self.local}; {rule}")

    @property
    def local(self) -> int:
        """Ranks that are started here."""
        return self.meeting.local or self.size

    def delay(self, attempt: int) -> float:
        """Seconds before the attempt, the first of a row being 1."""
        return min(self.longest_delay, self.first_delay * 2.0 ** (attempt - 1))


class RankGroup:
    """Ranks that are started, watched and started again; use it as a context manager, or `start` and `close` it.

    Threads may share it; one command runs at a time.
    """

    def __init__(self, settings: GroupSettings, told: Callable[[str], None] = lambda text: None) -> None:
        """`told` hears of each loss, failed start and start after a loss, in a thread of the group."""
        self._settings = settings
        self._told = told
        self._changed = threading.Condition()
        self._one_at_a_time = threading.Lock()
        self._closing = threading.Event()
        self._life: _Life | None = None
        self._failure: Exception = RankLost(CLOSED)
        self._failures = 0
        """Starts that did not succeed."""
        self._starts = 0
        self._numbers = count(1)
        # All processes are its children: the kernel ends them with it.
        self._keeper = threading.Thread(target=self._keep, name="ranks", daemon=True)

    def start(self) -> RankGroup:
        """Starts the ranks and waits until all are ready. Raises GroupError and RankLost, and has then ended them."""
        self._keeper.start()
        try:
            self._ready(Cancellation())
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Ends all ranks; they are gone when this returns."""
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join()

    def __enter__(self) -> RankGroup:
        """Starts it."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def restarts(self) -> int:
        """How often the group has been started again."""
        return max(0, self._starts - 1)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks here, in their order; none while there are none."""
        life = self._life
        return [] if life is None else [process.pid for process in life.processes]

    @property
    def facts(self) -> Mapping[str, list[int]]:
        """What the ranks of the running group say of themselves: each number of all ranks, in their order."""
        life = self._life
        first = life.processes[:1] if life is not None else []
        return {name: numbers for process in first for name, numbers in (process.facts or {}).items()}

    def run(
        self, header: Mapping[str, Any], parts: Sequence[bytes], cancellation: Cancellation
    ) -> Generator[Frame, None, None]:
        """The messages that answer a command, which must all be taken or the iterator closed; the last has "end".

        A group that is being started is waited for. When `cancellation` says so, every rank stops before its next step,
        and the end says that. Raises RankLost, Cancelled while there is no group, and FrameError for what is too large.
        """
        while not self._one_at_a_time.acquire(timeout=POLL_SECONDS):
            if cancellation.cancelled:
                raise Cancelled("cancelled before its turn")
        try:
            life = self._ready(cancellation)
            command = Frame({**header, "number": next(self._numbers)}, tuple(parts))
            # Refused before any rank hears of it.
            command.head()
            yield from life.run(command, cancellation)
        finally:
            self._one_at_a_time.release()

    def _ready(self, cancellation: Cancellation) -> _Life:
        with self._changed:
            before = self._failures
            while self._life is None or self._life.lost:
                if self._failures > before or not self._keeper.is_alive():
                    raise self._failure.with_traceback(None)
                if cancellation.cancelled:
                    raise Cancelled("cancelled before its ranks were ready")
                self._changed.wait(POLL_SECONDS)
            return self._life

    def _keep(self) -> None:
        attempt = 0
        while not self._closing.is_set():
            life, served = _Life(self._settings), 0.0
            try:
                served = self._live(life)
            except (GroupError, RankLost) as error:
                self._fail(error)
            finally:
                life.end()
            attempt = 1 if served > self._settings.steady else attempt + 1
            self._closing.wait(self._settings.delay(attempt))

    def _live(self, life: _Life) -> float:
        """One life of the group, to its end: for how many seconds it was ready. Raises GroupError and RankLost."""
        began = time.monotonic()
        life.begin()
        self._watch(life, lambda: life.ready)
        if life.lost:
            raise life.error()
        if not life.ready:
            return 0.0
        ready = time.monotonic()
        self._starts += 1
        if self._starts > 1:
            self._told(f"ready again after {ready - began:.1f} s")
        with self._changed:
            self._life = life
            self._changed.notify_all()
        self._watch(life, lambda: False)
        # Gone before anybody hears of it.
        life.end()
        with self._changed:
            self._life = None
        if not self._closing.is_set():
            self._told(str(life.error()))
        return time.monotonic() - ready

    def _watch(self, life: _Life, until: Callable[[], bool]) -> None:
        """Until then, or it is lost, or the group is to be closed."""
        while not until() and not life.lost and not self._closing.wait(POLL_SECONDS):
            life.watch()

    def _fail(self, error: Exception) -> None:
        """A start did not succeed: whoever waits for it hears of it."""
        self._told(str(error))
        with self._changed:
            self._failure = error
            self._failures += 1
            self._changed.notify_all()


class _Life:
    """The processes of a group from their start to their end."""

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self.processes: list[RankProcess] = []
        self.lost = ""
        """Why it is at its end."""
        self._said, self._setting = "", False
        """What the rank that was lost has said of it, and whether starting it again does not mend that."""
        self._answers: queue.Queue[Frame | None] = queue.Queue()
        """None is the end of the group."""
        self._began = time.monotonic()
        self._command: int | None = None
        """The one whose answer has not been taken."""
        self._works = False
        """Whether the ranks have not ended it."""

    @property
    def ready(self) -> bool:
        return all(process.facts is not None for process in self.processes)

    def begin(self) -> None:
        """Starts the processes. Raises GroupError for a port that is taken, and RankLost where there is no room."""
        try:
            self._begin()
        except (OSError, RuntimeError) as error:
            # No more processes, threads or files, which may be over when it is tried again.
            raise RankLost(NOT_STARTED, str(error)) from error

    def _begin(self) -> None:
        settings, meeting = self._settings, self._settings.meeting
        with ExitStack() as ours:
            listener = ours.enter_context(_listener(meeting))
            port = listener.getsockname()[1]
            for rank in range(settings.local):
                line, theirs = socket.socketpair()
                ours.enter_context(theirs)
                first = rank == 0
                place = Place(
                    rank=rank,
                    size=settings.size,
                    local=rank,
                    address=meeting.address,
                    port=port,
                    socket=theirs.fileno(),
                    listener=listener.fileno() if first else -1,
                    parent=os.getpid(),
                )
                environment = {**settings.environment, **place.environment(settings.local, settings.threads)}
                inherited = [theirs.fileno(), *([listener.fileno()] if first else [])]
                heard = self._hear if first else _ignore
                self.processes.append(RankProcess(rank, settings.program, environment, inherited, line, heard))

    def watch(self) -> None:
        """Finds out whether it has come to its end."""
        if any(process.ended for process in self.processes):
            # One follows the other within moments, and which was the first is what is to be told.
            time.sleep(POLL_SECONDS)
            ended = [process for process in self.processes if process.ended]
            first = min(ended, key=lambda process: (not process.killed, process.failed))
            self._said, self._setting = first.failure, first.setting
            self.lost = f"rank {first.rank} {first.ended}"
        else:
            self.lost = self._silent() or self._still()

    def _silent(self) -> str:
        """Which ranks give no sign of life; empty: none of them."""
        now, stall = time.monotonic(), self._settings.stall
        silent = {one.rank: now - one.beaten for one in self.processes if now - one.beaten > one.patience(stall)}
        return "; ".join(f"rank {rank} has given no sign of life for {gone:.0f} s" for rank, gone in silent.items())

    def _still(self) -> str:
        """Which ranks have a command and do not get on with it; empty: none of them."""
        still = time.monotonic() - max(self._began, *(process.moved for process in self.processes))
        if not self._works or still <= self._settings.stall:
            return ""
        # Who waits for another is not the one that hangs.
        held = [process for process in self.processes if not process.waits] or self.processes
        ranks = ", ".join(f"rank {one.rank} (at {one.at or 'no known place'})" for one in held)
        return f"no rank has moved for {still:.0f} s: {ranks}"

    def run(self, command: Frame, cancellation: Cancellation) -> Generator[Frame, None, None]:
        """The answer to a command."""
        self._began, self._command, self._works = time.monotonic(), command.header["number"], True
        try:
            self._send(command)
            yield from self._answer(cancellation)
        finally:
            # An answer that nobody wants any more: what is left of it is not the next one's.
            if self._command is not None and not self.lost:
                deque(self._answer(_CANCELLED), maxlen=0)
            self._command, self._works = None, False

    def end(self) -> None:
        """Ends all processes, at once and together."""
        self.lost = self.lost or CLOSED
        # Nobody is to see that another has gone, and say so in the log.
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.close()
        self.processes = []
        self._answers.put(None)

    def error(self) -> Exception:
        """How it was lost, for whoever asked something of it."""
        return GroupError(f"{self.lost}: {self._said}") if self._setting else RankLost(self.lost, self._said)

    def _hear(self, frame: Frame) -> None:
        """A message of rank 0; whoever asked may take it later."""
        self._works = self._works and "end" not in frame.header
        self._answers.put(frame)

    def _answer(self, cancellation: Cancellation) -> Generator[Frame, None, None]:
        """What comes to the end of the answer."""
        told = False
        while True:
            if not told and cancellation.cancelled:
                told = True
                self._send(Frame({"cancel": self._command}))
            try:
                frame = self._answers.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if frame is None:
                raise self.error()
            if "end" in frame.header:
                self._command = None
                yield frame
                return
            yield frame

    def _send(self, frame: Frame) -> None:
        with suppress(OSError, IndexError):
            self.processes[0].send(frame)
            return
        self._answers_to_end()

    def _answers_to_end(self) -> None:
        """Waits for the keeper to find out how the group was lost, and raises it."""
        while self._answers.get() is not None:
            pass
        raise self.error()


def _ignore(frame: Frame) -> None:
    """Answers are rank 0's."""


def _cancelled() -> Cancellation:
    cancellation = Cancellation()
    cancellation.cancel()
    return cancellation


_CANCELLED = _cancelled()


def _listener(meeting: Meeting) -> socket.socket:
    """Where the ranks meet. It is taken here, so that no other program can have the port meanwhile.

    Raises GroupError for one that was given and is in use.
    """
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((meeting.address, meeting.port))
        listener.listen()
    except OSError as error:
        listener.close()
        where = f"{meeting.address}:{meeting.port}"
        raise GroupError(
            f"ranks cannot meet at {where}: {error.strerror}; give another: MASTER_ADDR and MASTER_PORT"
        ) from error
    return listener
