"""Which releases of the packages that run engines are installed."""

from __future__ import annotations

import importlib.metadata

from engines.profile import Backend

DISTRIBUTIONS: dict[Backend, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt_cu13", "tensorrt_cu12"),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_cu13_bindings", "tensorrt_rtx_cu12_bindings"),
}
"""Names under which each one is distributed; the first is what to install."""


class BackendMissing(RuntimeError):
    """A backend's package is not installed; says how to install it."""


def installed(backend: Backend) -> dict[str, str]:
    """The installed release by the backend's name; empty where it is not installed."""
    try:
        return {backend: backend_version(backend)}
    except BackendMissing:
        return {}


def backend_version(backend: Backend) -> str:
    """The installed release.

    Raises:
        BackendMissing: it is not installed.
    """
    for name in DISTRIBUTIONS[backend]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise BackendMissing(f"{backend} is not installed; run: pip install {DISTRIBUTIONS[backend][0]}")
