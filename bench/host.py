"""What a measurement was taken on."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch

from bench.machine import GPU_QUERY


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
    """Bytes in use on the whole device, other processes' included, as nvidia-smi counts them."""
    free, total = torch.cuda.mem_get_info()
    return total - free
