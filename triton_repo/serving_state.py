"""What a server remembers from one start to the next, in a folder beside its model repository."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_RESTARTS, _DEVICE = "restarts", "device.lock"

RANKS = "h3trt-ranks."
"""Of the folder where models find their ranks, behind which comes the process id of tritonserver."""


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

    def clear(self) -> None:
        """Removes what a server has left that was killed with all that was its; none may run."""
        for left in self.folder.glob(f"{RANKS}*"):
            shutil.rmtree(left, ignore_errors=True)

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
