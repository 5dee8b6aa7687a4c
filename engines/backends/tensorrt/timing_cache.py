"""The file of kernel times that builds share: read before a build, merged and written after it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from engines.store import write_atomically

if TYPE_CHECKING:
    import tensorrt as trt

_LOG = logging.getLogger(__name__)


def attach(config: trt.IBuilderConfig, file: Path) -> trt.ITimingCache:
    """Gives the build the file's times; of a file that cannot be used, none, and it is set aside."""
    cache = _read(config, file)
    if not config.set_timing_cache(cache, False):
        _set_aside(file)
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def save(config: trt.IBuilderConfig, cache: trt.ITimingCache, file: Path) -> None:
    """Adds the build's times to what the file holds by now; builds that end at once wait for each other here."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        merged = _read(config, file)
        if not merged.combine(cache, False):
            _set_aside(file)
            merged = cache
        write_atomically(file, bytes(memoryview(merged.serialize())))


def _read(config: trt.IBuilderConfig, file: Path) -> trt.ITimingCache:
    data = file.read_bytes() if file.exists() else b""
    cache = config.create_timing_cache(data)
    if cache is None:
        _set_aside(file)
        cache = config.create_timing_cache(b"")
    return cache


def _set_aside(file: Path) -> None:
    """Moves away a file of another version or GPU, for good measure without deleting it."""
    if file.exists():
        aside = file.with_name(f"{file.name}.unusable")
        file.replace(aside)
        _LOG.warning("timing cache %s: not of this TensorRT and GPU; moved to %s", file, aside)
