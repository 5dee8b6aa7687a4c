"""Whether processes are still there."""

from __future__ import annotations

import psutil


def runs(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has reaped yet has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
