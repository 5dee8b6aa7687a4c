"""A model's line to the ranks that all models of its server share, which it starts where they are not there yet."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime import frames
from runtime.events import Cancellation, Cancelled
from runtime.frames import Frame, FrameError
from runtime.rank_errors import NOT_STARTED, GroupError, RankLost
from runtime.rank_process import POLL_SECONDS, interpreter
from runtime.ranks import GroupSettings
from triton_repo.rank_keeper import SOCKET, locked, readable
from triton_repo.serving_state import RANKS as FOLDERS

_ATTEMPTS = 3
"""A keeper may be at its end when a line to it is opened."""

KEEPER_GONE = "the process that keeps them has ended"


def folder_of(server: int, state: Path | None) -> Path:
    """Where the models of a tritonserver find the ranks that they share, by its process id.

    state: the folder of what the server remembers; None: there is none, and it lies among temporary files.
    """
    return (state or Path(tempfile.gettempdir())) / f"{FOLDERS}{server}"


def start_shared(folder: Path, settings: GroupSettings) -> SharedRanks:
    """A line to the ranks in a folder. Raises GroupError and RankLost when they do not start."""
    return SharedRanks(folder, settings).start()


class SharedRanks:
    """The ranks of a server, as one of its models has them; the first model that opens a line starts them.

    Their keeper ends when all lines are closed. One that was killed is started again with the next command.
    """

    def __init__(self, folder: Path, settings: GroupSettings) -> None:
        """folder: of this server's run alone; it is made, and removed with the last line."""
        self._folder, self._settings = folder, settings
        self._line: socket.socket | None = None
        self._one_at_a_time = threading.Lock()
        self._restarts = self._earlier = 0
        """Of this keeper, and of those that are gone."""
        self._facts: Mapping[str, list[int]] = {}

    def start(self) -> SharedRanks:
        """Opens the line; returns when all ranks are ready. Raises GroupError and RankLost."""
        self._line = self._greeted(Cancellation())
        return self

    @property
    def restarts(self) -> int:
        """How often the ranks have been started again, as far as this model has heard."""
        return self._earlier + self._restarts

    @property
    def facts(self) -> Mapping[str, list[int]]:
        """What the ranks say of themselves: each number of all ranks, in their order."""
        return self._facts

    def run(
        self, header: Mapping[str, Any], parts: Sequence[bytes], cancellation: Cancellation
    ) -> Generator[Frame, None, None]:
        """The messages that answer a command, which must all be taken or the iterator closed; the last has "end".

        Raises RankLost, Cancelled while ranks start, and FrameError for what is too large.
        """
        command = Frame(header, tuple(parts))
        command.head()
        with self._one_at_a_time:
            # Nothing comes unasked: what can be read is the end.
            if self._line is not None and readable(self._line, 0):
                self._drop()
            try:
                if self._line is None:
                    self._line = self._greeted(cancellation)
                yield from self._answer(self._line, command, cancellation)
            except (OSError, FrameError) as error:
                self._drop()
                raise RankLost(KEEPER_GONE, str(error)) from error
            except GroupError as error:
                # They have been there with the same settings.
                raise RankLost(NOT_STARTED, str(error)) from error

    def close(self) -> None:
        """Closes the line. The last one of them: the ranks are gone when this returns."""
        if self._line is None:
            return
        _close(self._line)
        self._line = None

    def _answer(self, line: socket.socket, command: Frame, cancellation: Cancellation) -> Generator[Frame, None, None]:
        frames.write(line, command)
        told = ended = False
        try:
            while not ended:
                if not told and cancellation.cancelled:
                    told = True
                    frames.write(line, _CANCEL)
                if readable(line, POLL_SECONDS):
                    frame = _next(line)
                    ended = not _ENDS.isdisjoint(frame.header)
                    self._hear(frame.header)
                    yield frame
        finally:
            if not ended:
                # An answer that nobody wants any more: what is left of it is not the next one's.
                with suppress(OSError, FrameError):
                    frames.write(line, _CANCEL)
                    while _ENDS.isdisjoint(_next(line).header):
                        pass

    def _hear(self, header: Mapping[str, Any]) -> None:
        """Takes what a message says of the ranks. Raises what they have failed with."""
        self._restarts, self._facts = header.get("restarts", self._restarts), header.get("facts", self._facts)
        if "lost" in header:
            raise RankLost(header["lost"], header["said"])
        if "setting" in header:
            raise GroupError(header["setting"])

    def _greeted(self, cancellation: Cancellation) -> socket.socket:
        """A line to a keeper whose ranks are ready."""
        for _ in range(_ATTEMPTS):
            try:
                with locked(self._folder):
                    line = _connected(self._folder) or self._of_new_keeper()
            except OSError as error:
                raise RankLost(NOT_STARTED, str(error)) from error
            try:
                while not readable(line, POLL_SECONDS):
                    if cancellation.cancelled:
                        raise Cancelled("cancelled before its ranks were ready")
                if (greeting := frames.read(line)) is not None:
                    self._hear(greeting.header)
                    return line
            except (OSError, FrameError):
                line.close()
            except (Cancelled, GroupError, RankLost):
                _close(line)
                raise
            else:
                line.close()
        raise RankLost(KEEPER_GONE)

    def _of_new_keeper(self) -> socket.socket:
        """A line to a keeper that is started here."""
        with socket.socket(socket.AF_UNIX) as listener:
            with _address(self._folder) as address:
                (self._folder / SOCKET).unlink(missing_ok=True)
                listener.bind(address)
            listener.listen()
            settings = json.dumps({n: v for n, v in asdict(self._settings).items() if n != "environment"})
            given = str(listener.fileno()), str(self._folder), settings
            command = [interpreter(), "-P", "-m", "triton_repo.rank_keeper", *given]
            keeper = subprocess.Popen(  # noqa: S603 - our own argument list, no shell
                command,
                env=dict(self._settings.environment),
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
            )
            threading.Thread(target=keeper.wait, daemon=True).start()
            line = _connected(self._folder)
        if line is None:
            raise RankLost(KEEPER_GONE)
        return line

    def _drop(self) -> None:
        if self._line is None:
            return
        self._line.close()
        self._line = None
        # Those that come next count from 0 again; what has been told only grows.
        self._earlier, self._restarts = self.restarts + 1, 0


_CANCEL = Frame({"cancel": True})

_ENDS = frozenset(("end", "lost", "setting"))
"""Of which the last message of an answer has one."""


def _connected(folder: Path) -> socket.socket | None:
    """A line to the keeper of a folder, if there is one."""
    line = socket.socket(socket.AF_UNIX)
    try:
        with _address(folder) as address:
            line.connect(address)
    except (FileNotFoundError, ConnectionRefusedError):
        line.close()
        return None
    return line


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """The socket's, however long the folder's name is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def _close(line: socket.socket) -> None:
    """Returns when the keeper has closed its end: if this was the last line, the ranks are gone."""
    with line, suppress(OSError, FrameError):
        line.shutdown(socket.SHUT_WR)
        while frames.read(line) is not None:
            pass


def _next(line: socket.socket) -> Frame:
    frame = frames.read(line)
    if frame is None:
        raise FrameError("the line has been closed")
    return frame
