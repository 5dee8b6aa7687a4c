"""What a server remembers from one start to the next, in a folder beside its model repository."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_RESTARTS, _DEVICE = "restarts", "device.lock"


@dataclass(frozen=True)
class ServingState:
    """The folder; it is made when something is first kept in it."""

    folder: Path

    @property
    def timings(self) -> Path:
        """The folder of what requests have taken (`runtime.timings`)."""
        return self.folder / "timings"

    @contextmanager
    def device(self) -> Iterator[None]:
        """Has the device to itself among the processes of the server."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _DEVICE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def forget_restarts(self) -> None:
        """Count from nothing: a new `h3trt serve` has begun."""
        (self.folder / _RESTARTS).unlink(missing_ok=True)

    def count_restart(self) -> None:
        """One more restart; the server that starts next publishes how many there were."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _RESTARTS).write_text(str(self.restarts() + 1))

    def restarts(self) -> int:
        """Restarts since `h3trt serve` began."""
        try:
            return int((self.folder / _RESTARTS).read_text())
        except (FileNotFoundError, ValueError):
            return 0
