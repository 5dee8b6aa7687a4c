"""A private name prefix for the shared memory of one server, so that what a killed server left can be told and removed.

Triton's Python backend makes files in /dev/shm and leaves them there when it is killed. Each server gets a prefix of
its own and holds the lock on `<prefix>lock` as long as it lives: a prefix whose lock can be taken has no owner.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/dev/shm")  # noqa: S108 - where Triton's Python backend puts its regions
FAMILY = "h3trt_"


@contextmanager
def private_prefix(root: Path = ROOT) -> Iterator[str]:
    """A prefix for `shm-region-prefix-name`; every file that begins with it is removed on leaving."""
    remove_abandoned(root)
    prefix = f"{FAMILY}{secrets.token_hex(6)}_"
    unlocked = root / f".{prefix}lock"
    with unlocked.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # It gets its name when it is locked, so that nobody finds it without an owner.
        unlocked.rename(root / f"{prefix}lock")
        try:
            yield prefix
        finally:
            _remove(root, prefix)


def remove_abandoned(root: Path = ROOT) -> list[str]:
    """Remove the files of this user's servers that were killed; returns their prefixes."""
    locks = [path for path in root.glob(f"{FAMILY}*_lock") if _abandoned(path)]
    prefixes = [path.name.removesuffix("lock") for path in locks]
    for prefix in prefixes:
        _remove(root, prefix)
    return prefixes


def _abandoned(lock: Path) -> bool:
    try:
        with lock.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(file.fileno()).st_uid == os.getuid()
    except (BlockingIOError, FileNotFoundError, PermissionError):
        return False


def _remove(root: Path, prefix: str) -> None:
    for path in root.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)
