"""What this machine lets a process use, containers' limits included, and whom it lets it die with."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux shows the limits of the container (control groups, version 2)."""

_PR_SET_PDEATHSIG = 1
"""Number of prctl's request to be sent a signal when the parent ends (linux/prctl.h)."""


def available_processors(cgroup: Path = CGROUP) -> int:
    """Processors this process may run on: its affinity mask, cut to the container's quota (rounded up)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    return min(allowed, max(1, -(-int(quota) // int(period)))) if quota.isdigit() else allowed


def memory_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes of physical memory, cut to the container's limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(cgroup / "memory.max")
    return min(physical, int(limit)) if limit.isdigit() else physical


def gpu_capabilities() -> tuple[str, ...]:
    """Compute capability, such as "9.0", of each NVIDIA GPU that this process may use."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple("{}.{}".format(*torch.cuda.get_device_capability(index)) for index in range(count))


def target(device: torch.device) -> str:
    """What code compiled for a device runs on: a GPU's compute capability, or a processor's vector instructions."""
    import torch

    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    return "{}.{}".format(*torch.cuda.get_device_capability(device))


class DieWith:
    """Called in a process: has the kernel kill it when the thread of its parent that started it ends.

    It is ended at once, with status 1, where the parent has gone already.
    """

    def __init__(self, parent: int) -> None:
        # Looked up here, since loading a library between fork and exec may deadlock.
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._parent = parent

    def __call__(self) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:
            os._exit(1)


def _read(path: Path) -> str:
    """The file's text, or nothing where there is no limit to read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
