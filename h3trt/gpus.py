"""The GPUs of this machine as NVIDIA's management library tells of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


class GpusUnknown(RuntimeError):
    """The GPUs cannot be asked about; `remedy` is the command that mends it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Gpu:
    """One GPU: name, bytes of memory, compute capability such as 12.0."""

    name: str
    memory: int
    capability: str


@dataclass(frozen=True)
class Installed:
    """The driver's version, the newest CUDA that it runs (such as 13.0), and the GPUs in the driver's order."""

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]


def installed_gpus() -> Installed:
    """Asks the driver.

    Raises:
        GpusUnknown: the library's bindings are not installed, or there is no driver.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise GpusUnknown("nvidia-ml-py is not installed", "pip install nvidia-ml-py") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise GpusUnknown(f"no NVIDIA driver: {error}", "apt-get install nvidia-open && reboot") from error
    try:
        gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return Installed(_text(nvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}", gpus)
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(_text(nvml.nvmlDeviceGetName(handle)), nvml.nvmlDeviceGetMemoryInfo(handle).total, f"{major}.{minor}")


def _text(value: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
