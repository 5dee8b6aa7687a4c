"""RIFF files (WAV, WEBP): their chunks, read without trust."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_STREAMED = 0xFFFFFFFF
"""The size that a writer leaves who could not seek back: the data go on to the end of the file."""


class RiffError(ValueError):
    """Bytes that are no sound RIFF file; the message is the rule that they break."""


@dataclass(frozen=True)
class Chunk:
    """One chunk: its four-character name and the place of its payload in the file."""

    name: bytes
    start: int
    end: int


def chunks(data: bytes) -> Iterator[Chunk]:
    """The chunks of a RIFF file, in order. Raises RiffError where one claims more than the file has."""
    at = 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        chunk = Chunk(data[at : at + 4], at + 8, at + 8 + size)
        if chunk.end > len(data):
            if chunk.name == b"data" and size == _STREAMED:
                yield Chunk(chunk.name, chunk.start, len(data))
                return
            name = chunk.name.decode("latin-1")
            raise RiffError(f"its chunk {name!r} claims {size} bytes where {len(data) - at - 8} are left: truncated")
        yield chunk
        at = chunk.end + size % 2


def plain_wav(data: bytes) -> bytes:
    """A WAV file with nothing but its format and its samples. Raises RiffError where it has none.

    What else a file may hold (tags, pictures, compressed text) is not wanted, and so no library has to read it.
    """
    found: dict[bytes, Chunk] = {}
    for chunk in chunks(data):
        found.setdefault(chunk.name, chunk)
    if b"fmt " not in found or b"data" not in found:
        raise RiffError("it has no format or no samples (chunks 'fmt ' and 'data')")
    kept = (b"fmt ", b"data")
    body = b"".join(_written(name, data[found[name].start : found[name].end]) for name in kept)
    return b"RIFF" + (len(body) + 4).to_bytes(4, "little") + b"WAVE" + body


def _written(name: bytes, payload: bytes) -> bytes:
    return name + len(payload).to_bytes(4, "little") + payload + b"\0" * (len(payload) % 2)
