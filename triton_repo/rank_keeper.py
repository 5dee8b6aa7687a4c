"""The process that keeps a server's ranks: all its models run engines there, so that a GPU holds weights once.

It is nobody's: `triton_repo.shared_ranks` starts it from the first model that needs it, whose process may end before
the others'. It ends, and the ranks with it, when the last model has closed its line.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from runtime import frames
from runtime.events import Cancellation, Cancelled
from runtime.frames import Frame, FrameError
from runtime.rank_errors import GroupError, RankLost
from runtime.rank_place import Meeting
from runtime.rank_process import POLL_SECONDS
from runtime.ranks import GroupSettings, RankGroup
from triton_repo.logs import Log, set_up

SOCKET, _LOCK = "ranks", "lock"

FIRST_LINE_SECONDS = 10.0
"""How long it waits for the model that has started it, which opens its line at once."""

PAUSE_SECONDS = 1.0
"""After a line that could not be taken."""

FAILED = "the process that keeps them has failed"


def readable(line: socket.socket, seconds: float) -> bool:
    """Whether there is something to read within that time, or the end."""
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


class Keeper:
    """A group of ranks, and the lines of those that have work for it."""

    def __init__(self, settings: GroupSettings, log: Log) -> None:
        self._log = log
        self._group = RankGroup(settings, lambda text: log.warning("ranks", reason=text))
        self._changed = threading.Condition()
        self._started = self._ended = False
        self._failure: Frame | None = None
        """Why the ranks have not started."""
        self._lines = 0
        self._had_lines = self._over = False

    def run(self, listener: socket.socket, folder: Path) -> None:
        """Serves until the last line is closed; the ranks are gone when this returns, and so is the socket's folder."""
        own = (folder / SOCKET).stat().st_ino
        for task in (self._start, lambda: self._accept(listener)):
            threading.Thread(target=task, daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._had_lines, FIRST_LINE_SECONDS)
            self._changed.wait_for(lambda: not self._lines)
            # Who comes now finds the line closed, and starts another.
            self._over = True
            listener.close()
        self._group.close()
        with suppress(OSError, GroupError):
            # Another keeper may have come here meanwhile; a server that was killed is cleared away by the next one.
            if folder.exists():
                with locked(folder):
                    if (folder / SOCKET).stat().st_ino == own:
                        shutil.rmtree(folder)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _start(self) -> None:
        failure = None
        try:
            self._group.start()
        except (GroupError, RankLost) as error:
            failure = failed(error)
        except Exception as error:
            self._log.error("the ranks were not started", error)
            failure = Frame({"lost": FAILED, "said": repr(error)})
        with self._changed:
            self._started, self._failure = True, failure
            self._changed.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        while not self._over:
            try:
                line, _ = listener.accept()
            except OSError as error:
                # It is closed at the end; or there are no more descriptors, for the moment.
                if not self._over:
                    self._log.warning("a line to the ranks was not taken", reason=str(error))
                    time.sleep(PAUSE_SECONDS)
                continue
            with self._changed:
                if self._over:
                    line.close()
                    return
                self._lines, self._had_lines = self._lines + 1, True
                self._changed.notify_all()
            try:
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()
            except RuntimeError as error:
                self._log.warning("a line to the ranks was not taken", reason=str(error))
                self._leave(line)

    def _serve(self, line: socket.socket) -> None:
        """One model, to the end of its line."""
        cancelled = threading.Event()
        threads: list[threading.Thread] = []
        try:
            self._greet(line)
            while (frame := frames.read(line)) is not None:
                if "cancel" in frame.header:
                    cancelled.set()
                    continue
                cancelled = threading.Event()
                thread = threading.Thread(target=self._answer, args=(line, frame, cancelled), daemon=True)
                thread.start()
                threads = [thread]
        except (OSError, FrameError, RuntimeError) as error:
            self._log.warning("a line of the ranks has broken", reason=str(error))
        finally:
            cancelled.set()
            for thread in threads:
                thread.join()
            self._leave(line)

    def _greet(self, line: socket.socket) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: self._started, POLL_SECONDS):
                # Who waits says nothing: what can be read is the end.
                if readable(line, 0):
                    raise OSError("closed while ranks start")
        frames.write(line, self._failure or self._told({"ready": True}))

    def _leave(self, line: socket.socket) -> None:
        """The last one sees its line closed when the ranks are gone."""
        with self._changed:
            self._lines -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._lines > 0)
        line.close()

    def _answer(self, line: socket.socket, command: Frame, cancelled: threading.Event) -> None:
        def send(frame: Frame) -> None:
            try:
                frames.write(line, frame)
            except OSError:
                cancelled.set()

        try:
            for frame in self._group.run(command.header, command.parts, Cancellation(cancelled.is_set)):
                send(self._told(frame.header, frame.parts) if "end" in frame.header else frame)
        except (GroupError, RankLost) as error:
            send(self._told(failed(error).header))
        except Cancelled as error:
            send(self._told({"end": "cancelled", "text": str(error)}))
        except Exception as error:
            self._log.error("a command of the ranks", error)
            send(self._told({"lost": FAILED, "said": repr(error)}))

    def _told(self, header: Mapping[str, Any], parts: tuple[bytes, ...] = ()) -> Frame:
        """A message, with what is known of the ranks."""
        return Frame({**header, "restarts": self._group.restarts, "facts": dict(self._group.facts)}, parts)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time looks whether there is a keeper in a folder, starts one, or clears away; it is made."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise GroupError(f"{folder}: must be a folder of this user alone, for the ranks' socket; remove it")
        with suppress(FileNotFoundError), ExitStack() as held:
            lock = held.enter_context((folder / _LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Whoever had it may have removed it.
            if (folder / _LOCK).stat().st_ino == os.fstat(lock.fileno()).st_ino:
                held = held.pop_all()
                break
    with held:
        yield


def failed(error: GroupError | RankLost) -> Frame:
    """An error of the group as a message."""
    if isinstance(error, RankLost):
        return Frame({"lost": error.message, "said": error.said})
    return Frame({"setting": str(error)})


def main(listener: str, folder: str, settings: str) -> None:
    """listener: descriptor of a socket that listens in the folder. settings: `GroupSettings` as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # They reach all processes of a foreground or a service; a server still answers what it has accepted.
        signal.signal(number, signal.SIG_IGN)
    set_up()
    given = json.loads(settings)
    wanted = GroupSettings(**{**given, "program": tuple(given["program"]), "meeting": Meeting(**given["meeting"])})
    Keeper(wanted, Log("ranks")).run(socket.socket(fileno=int(listener)), Path(folder))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
