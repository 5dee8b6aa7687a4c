"""Several files as one ZIP, made while it is sent."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

_CHUNK = 256 << 10


class _Pipe(io.RawIOBase):
    """A file to write to, of which what was written can be taken away."""

    def __init__(self) -> None:
        super().__init__()
        self._written = bytearray()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any) -> int:
        """Keeps the bytes."""
        self._written += data
        return len(data)

    def take(self) -> bytes:
        """What was written since the last call."""
        data = bytes(self._written)
        self._written.clear()
        return data


def zipped(paths: Sequence[Path]) -> Iterator[bytes]:
    """The bytes of a ZIP of the files under their own names, as they are: an MP4 has nothing left to compress."""
    pipe = _Pipe()
    with zipfile.ZipFile(cast(IO[bytes], pipe), "w", zipfile.ZIP_STORED) as archive:
        for path in paths:
            with path.open("rb") as source, archive.open(path.name, "w") as target:
                while chunk := source.read(_CHUNK):
                    target.write(chunk)
                    yield pipe.take()
            yield pipe.take()
    yield pipe.take()
