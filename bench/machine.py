"""The machine that measures, without torch: a load generator has none."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from engines.machine import available_processors, memory_bytes

_ROOT = Path(__file__).parents[1]

GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
"""Tells a line for each GPU."""


def describe() -> dict[str, Any]:
    """Processor, memory, GPUs, and how busy the machine was already."""
    return {
        "processor": processor(),
        "processors": available_processors(),
        "memory_bytes": memory_bytes(),
        "gpus": _said(GPU_QUERY).splitlines(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
    }


def commit() -> str:
    """The commit of this code, with a plus where files differ from it; empty outside a checkout."""
    found = _said(("git", "-C", str(_ROOT), "rev-parse", "HEAD")).strip()
    changed = _said(("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")).strip()
    return f"{found}+" if found and changed else found


def processor() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _said(command: tuple[str, ...]) -> str:
    """What a program printed; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
