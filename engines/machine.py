"""What this machine lets a process use: processors and memory, containers' limits included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux shows the limits of the container (control groups, version 2)."""


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


def _read(path: Path) -> str:
    """The file's text, or nothing where there is no limit to read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
