"""The server's side of one rank that it has started: the process, its line, and when it last moved."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runtime import frames
from runtime.frames import Frame, FrameError

POLL_SECONDS = 0.1

START_SECONDS = 120.0

Heard = Callable[[Frame], None]


class RankProcess:
    """A rank. `heard` gets its messages, in a thread of its own; beats are counted here."""

    def __init__(
        self,
        rank: int,
        program: Sequence[str],
        environment: Mapping[str, str],
        inherited: Sequence[int],
        line: socket.socket,
        heard: Heard,
    ) -> None:
        """program: arguments of Python. inherited: file descriptors that the process has too. line: to it, this end.

        The kernel ends the process with the thread that makes this call.
        """
        self.rank = rank
        self.failure, self.failed = "", 0.0
        """What the rank itself said of why it ends, and when."""
        self.setting = False
        """Whether that is something that starting it again does not mend."""
        self.facts: Mapping[str, list[int]] | None = None
        """Of a rank that is ready: each number of all ranks."""
        self.beaten = self.moved = time.monotonic()
        self.at, self.waits = "", False
        """Where it was at the last beat, and whether it waited for another rank."""
        self._count = 0
        self._heard = heard
        self._line = line
        self._sending = threading.Lock()
        self._process = subprocess.Popen(  # noqa: S603 - our own argument list, no shell
            [interpreter(), *program], env=environment, stdin=subprocess.DEVNULL, pass_fds=inherited
        )
        self._reader = threading.Thread(target=self._read, name=f"rank {rank}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> str:
        """How the process has ended, in words; empty while it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        # What it said before is still to be read.
        self._reader.join(POLL_SECONDS)
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    @property
    def killed(self) -> bool:
        """Whether a signal has ended it."""
        return (self._process.poll() or 0) < 0

    def patience(self, stall: float) -> float:
        """Seconds that it may be silent; loading its libraries, no thread of it says anything."""
        return stall if self.facts is not None else max(stall, START_SECONDS)

    def send(self, frame: Frame) -> None:
        """Sends it a message. Raises OSError when it has gone."""
        with self._sending:
            frames.write(self._line, frame)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def close(self) -> None:
        """Gives back what is held of one that was killed; it is gone when this returns."""
        self._process.wait()
        # It may have handed its end on: what reads from the line stops all the same.
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._line.close()

    def _read(self) -> None:
        try:
            while (frame := frames.read(self._line)) is not None:
                self._take(frame)
        except (FrameError, KeyError, TypeError) as error:
            self._fail(f"sent what is no message: {error!r}")
        except OSError:
            # The other end has gone with what it had not read yet.
            pass
        finally:
            # One that cannot be talked with is of no use.
            self._process.kill()

    def _take(self, frame: Frame) -> None:
        header = frame.header
        self.beaten = time.monotonic()
        if "beat" in header:
            beat = header["beat"]
            self.at, self.waits = str(beat["at"]), bool(beat["waits"])
            if beat["moved"] != self._count:
                self._count, self.moved = beat["moved"], self.beaten
        elif "ready" in header:
            self.facts = header["ready"]
        elif "failed" in header:
            self.setting = bool(header["setting"])
            self._fail(str(header["failed"]))
        else:
            self._heard(frame)

    def _fail(self, text: str) -> None:
        if not self.failure:
            self.failure, self.failed = text, time.monotonic()


def interpreter() -> str:
    """This environment's Python. Inside Triton's stub, `sys.executable` may be another one or none."""
    own = Path(sys.prefix, "bin", "python3")
    return str(own) if own.exists() else sys.executable
