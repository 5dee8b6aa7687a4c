"""Messages between a server and its ranks over a stream socket: a JSON object, and parts of bytes behind it.

A message on the wire is a mark, the length of the JSON, the JSON of `{"parts": [lengths], "header": {...}}`, and the
parts. Nothing in it is code. It imports no torch: parts are safetensors, files and MP4, as the header says.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_HEADER_BYTES = 4 << 20
"""A resolved request, its notes and all, takes a hundredth of it."""

MOST_PARTS = 64

MOST_BYTES = 1 << 30
"""Of all parts of a message: the largest request's rows take a tenth of it."""

_MARK = b"h3r1"
_PREFIX = struct.Struct("<4sI")


class FrameError(ValueError):
    """Bytes that are no message, or a message that is too large."""


@dataclass(frozen=True, eq=False)
class Frame:
    """One message: `header` is a JSON object, `parts` what goes with it."""

    header: Mapping[str, Any]
    parts: tuple[bytes, ...] = field(default=(), repr=False)

    def head(self) -> bytes:
        """What is sent before the parts. Raises FrameError for a message that is too large."""
        lengths = [len(part) for part in self.parts]
        _check_sizes(lengths)
        header = json.dumps({"parts": lengths, "header": self.header}).encode()
        if len(header) > MOST_HEADER_BYTES:
            raise FrameError(f"header: {len(header)} bytes, must be at most {MOST_HEADER_BYTES}")
        return _PREFIX.pack(_MARK, len(header)) + header


def write(stream: socket.socket, frame: Frame) -> None:
    """Sends a message. Raises FrameError for one that is too large, and OSError where nobody reads it."""
    stream.sendall(frame.head())
    for part in frame.parts:
        stream.sendall(part)


def read(stream: socket.socket) -> Frame | None:
    """The next message, None at the end of the stream.

    Raises FrameError for what is none or too large, before any of it is kept, and OSError.
    """
    prefix = _exactly(stream, _PREFIX.size, may_end=True)
    if not prefix:
        return None
    mark, length = _PREFIX.unpack(prefix)
    if mark != _MARK:
        raise FrameError(f"mark: got {bytes(mark)!r}, must be {_MARK!r}")
    if length > MOST_HEADER_BYTES:
        raise FrameError(f"header: {length} bytes, must be at most {MOST_HEADER_BYTES}")
    header, lengths = _parsed(_exactly(stream, length))
    return Frame(header, tuple(_exactly(stream, size) for size in lengths))


def _parsed(text: bytes) -> tuple[Mapping[str, Any], list[int]]:
    try:
        whole = json.loads(text)
        header, lengths = whole["header"], whole["parts"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError("header: must be JSON with parts and header") from error
    if not isinstance(header, dict) or not isinstance(lengths, list):
        raise FrameError("header: must have an object as header and a list as parts")
    _check_sizes(lengths)
    return header, lengths


def _check_sizes(lengths: list[int]) -> None:
    if not all(type(length) is int and length >= 0 for length in lengths):
        raise FrameError("parts: must be lengths in bytes")
    if len(lengths) > MOST_PARTS or sum(lengths) > MOST_BYTES:
        rule = f"must be at most {MOST_PARTS}, of {MOST_BYTES} bytes together"
        raise FrameError(f"parts: {len(lengths)} of {sum(lengths)} bytes, {rule}")


def _exactly(stream: socket.socket, size: int, may_end: bool = False) -> bytes:
    """So many bytes. None of them: the stream has ended, where it may."""
    content = bytearray(size)
    view, got = memoryview(content), 0
    while got < size:
        count = stream.recv_into(view[got:])
        if not count:
            if may_end and not got:
                return b""
            raise FrameError(f"message: ended after {got} of {size} bytes")
        got += count
    return bytes(content)
