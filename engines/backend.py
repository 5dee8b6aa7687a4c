"""Which release of the package that runs a profile's engines is installed."""

from __future__ import annotations

import importlib.metadata

from engines import tensorrt
from engines.profile import Backend


class BackendMissing(RuntimeError):
    """A backend's package is not installed; says how to install it."""


def backend_version(backend: Backend) -> str:
    """The installed release.

    Raises:
        BackendMissing: it is not installed, or does not load.
    """
    if backend == "inductor":
        return _torch_version()
    try:
        return importlib.metadata.version(backend) if backend == "onnxruntime" else tensorrt.load(backend).version
    except importlib.metadata.PackageNotFoundError:
        raise BackendMissing(f"{backend} is not installed; run: pip install {backend}") from None
    except tensorrt.TensorRTMissing as missing:
        raise BackendMissing(str(missing)) from None


def _torch_version() -> str:
    """With the build that it is, such as +cu130: compiled code calls that build's own functions."""
    import torch

    return str(torch.__version__)


def installed(backend: Backend) -> dict[str, str]:
    """The installed release by the backend's name; empty where it is not installed."""
    try:
        return {backend: backend_version(backend)}
    except BackendMissing:
        return {}
