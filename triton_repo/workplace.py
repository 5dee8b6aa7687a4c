"""The folder that one running server has to itself: its model repository and its log."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triton_repo.errors import ServerError

LOCK = ".lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps the folder for this process until the block is left or the process ends, however it ends.

    Raises:
        ServerError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Not inherited by children: a server that is slow to die must not keep its parent's folder.
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerError(
                f"{folder} is in use by another server of this profile",
                "stop that one first, or serve from another working directory",
            ) from None
        yield
