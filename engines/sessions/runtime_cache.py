"""Kernels that TensorRT-RTX has compiled for this GPU, kept in a file from one process to the next."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from engines.store import write_atomically

if TYPE_CHECKING:
    import tensorrt as trt

LARGEST = 1 << 30
"""Bytes of a file that is still written or read."""

_LOG = logging.getLogger(__name__)


class RuntimeCache:
    """One cache for all engines of a process, and its file. A file that does not fit is as good as none.

    TensorRT itself refuses the kernels of another GPU, driver or version.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._cache: trt.IRuntimeCache | None = None
        self._saved = b""

    def attach(self, config: trt.IRuntimeConfig) -> None:
        """Has the contexts of a configuration use the cache."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._load(self._cache)
        config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Writes the file if kernels were compiled since the last time; that it cannot be written is only logged."""
        if self._cache is None:
            return
        serialized: trt.IHostMemory = self._cache.serialize()
        content = bytes(memoryview(serialized))
        digest = hashlib.sha256(content).digest()
        if digest == self._saved or len(content) > LARGEST:
            return
        try:
            write_atomically(self._file, content)
        except OSError as error:
            _LOG.warning("%s: compiled kernels are not kept: %s", self._file, error)
            return
        self._saved = digest

    def _load(self, cache: trt.IRuntimeCache) -> None:
        try:
            content = self._file.read_bytes() if self._file.stat().st_size <= LARGEST else b""
        except OSError:
            return
        if content and cache.deserialize(content):
            self._saved = hashlib.sha256(content).digest()
        else:
            _LOG.warning("%s: compiled for another GPU, driver or TensorRT; kernels are compiled anew", self._file)
