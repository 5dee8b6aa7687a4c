"""Boxes of the ISO base media format (ISO/IEC 14496-12), read without trust: MP4, MOV and HEIF are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


class BoxError(ValueError):
    """Bytes that are no sound tree of boxes; the message is the rule that they break."""


@dataclass(frozen=True)
class Box:
    """One box: its four-character type and the place of its payload in the file."""

    type: bytes
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """The type as a text shows it."""
        return self.type.decode("latin-1")


def children(data: bytes, start: int, end: int) -> Iterator[Box]:
    """The boxes that lie one after another in data[start:end]. Raises BoxError where one claims more than there is.

    Fewer than eight bytes at the end are padding; QuickTime closes a list with four zero bytes.
    """
    while end - start >= 8:
        size = int.from_bytes(data[start : start + 4], "big")
        header = 8
        if size == 1:
            size, header = int.from_bytes(data[start + 8 : start + 16], "big"), 16
        elif size == 0:
            size = end - start
        box = Box(data[start + 4 : start + 8], start + header, start + size)
        if size < header or box.end > end:
            raise BoxError(f"its box {box.name!r} claims {size} bytes where {end - start} are left: truncated or lying")
        yield box
        start = box.end
