"""The file of kernel times that builds share: read before a build, merged and written after it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from engines.backends.tensorrt.messages import Messages
from engines.store import write_atomically

if TYPE_CHECKING:
    import tensorrt as trt

_LOG = logging.getLogger(__name__)


class TimingCache:
    """One build's part in a file of kernel times. Two builds at once lose nothing: the second merges with the first's.

    A file that this TensorRT and GPU cannot use is moved aside and the build starts without times.
    """

    def __init__(self, config: trt.IBuilderConfig, file: Path, messages: Messages) -> None:
        self._config: trt.IBuilderConfig = config
        self._file = file
        self._messages = messages
        self._lock = FileLock(f"{file}.lock")
        file.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._cache: trt.ITimingCache = self._read()
            if not config.set_timing_cache(self._cache, False):
                self._cache = self._start_anew()
                config.set_timing_cache(self._cache, False)

    def save(self) -> None:
        """Adds the build's times to what the file holds by now; builds that end at once wait for each other here."""
        with self._lock:
            merged = self._read()
            if not merged.combine(self._cache, False):
                merged = self._start_anew()
                merged.combine(self._cache, False)
            write_atomically(self._file, bytes(memoryview(merged.serialize())))

    def _read(self) -> trt.ITimingCache:
        """The file's times. Of a file that does not fit, TensorRT makes an empty cache and says so in its log."""
        data = self._file.read_bytes() if self._file.exists() else b""
        before = self._messages.complaints
        cache = self._config.create_timing_cache(data)
        return self._start_anew() if data and (cache is None or self._messages.complaints > before) else cache

    def _start_anew(self) -> trt.ITimingCache:
        """An empty cache; the file, if there is one, is kept under another name."""
        if self._file.exists():
            aside = self._file.with_name(f"{self._file.name}.unusable")
            self._file.replace(aside)
            _LOG.warning("timing cache %s: not of this TensorRT and GPU; moved to %s", self._file, aside)
        return self._config.create_timing_cache(b"")
