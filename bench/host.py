"""What a measurement was taken on."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch

from bench.machine import GPU_QUERY

MEMORY_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
"""Tells MiB."""


def describe() -> dict[str, Any]:
    """GPU, driver and versions."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": "{}.{}".format(*torch.cuda.get_device_capability()),
        "nvidia_smi": subprocess.run(GPU_QUERY, capture_output=True, text=True, check=True).stdout.strip(),  # noqa: S603
        "torch": str(torch.__version__),
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
    }


def used_memory() -> int:
    """Bytes of the device that cannot be had any more, as a profile counts its memory: what nvidia-smi calls its total.

    CUDA's own total is less: the driver keeps some (`memory.reserved`), which the plan has among what is taken.
    """
    identity = f"--id=GPU-{torch.cuda.get_device_properties().uuid}"
    told = subprocess.run((*MEMORY_QUERY, identity), capture_output=True, text=True, check=True).stdout  # noqa: S603
    free, _ = torch.cuda.mem_get_info()
    return (int(told) << 20) - free
