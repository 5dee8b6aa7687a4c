"""The structure of an MP4 or MOV file, checked before FFmpeg sees it.

FFmpeg makes an index entry of every sample that a table names and follows references to other files where it is told
to. So every table must have the entries that it claims, name no more samples than a clip can have, and refer to this
file only. That bounds the memory and time of opening a file by its size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.media.boxes import Box, BoxError, children

SAMPLES_MAXIMUM = 1 << 18
"""Of each table, each track and all fragments: 15 s of 60 frames a second make 900, of AAC 1,400."""
BOXES_MAXIMUM = 1 << 16
DEPTH_MAXIMUM = 10

_CONTAINERS = frozenset(
    b"dinf edts ilst mdia minf moof moov mvex schi sinf stbl traf trak tref udta wave iprp".split(),
)
"""What FFmpeg descends into, `meta` apart."""

_ENTRY_BYTES = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4, b"stps": 4}
"""Tables of a count and entries of so many bytes."""

_REFUSED = {b"cmov": "a compressed index", b"rmra": "references to other movies"}

_NEVER_IN_DESCRIPTIONS = (b"trak", b"moov", b"moof", b"stbl", *_ENTRY_BYTES, b"stsz", b"stz2", b"trun")
"""FFmpeg would read these inside a sample description too."""

_IDENTITY = (1, 0, 0, 1)
_FIXED_POINT = 1 << 16
_UNKNOWN_DURATIONS = (0, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)

Turn = tuple[int, int, int, int]
"""a, b, c, d of a display matrix whose entries are -1, 0 or 1: (x, y) goes to (a*x + c*y, b*x + d*y)."""


@dataclass(frozen=True)
class Movie:
    """What the header says. seconds: its claim, None where it claims nothing; turns: display matrix by track id."""

    seconds: float | None
    turns: dict[int, Turn]


def read_movie(data: bytes) -> Movie:
    """Checks the structure of a whole MP4 or MOV file. Raises BoxError."""
    walk = _Walk(data)
    walk.descend(0, len(data), 0)
    if not walk.has_index:
        raise BoxError("it has no index (moov box): not finished, or truncated")
    turns = {track: _product(turn, walk.movie_turn) for track, turn in walk.turns.items()}
    return Movie(seconds=walk.seconds, turns=turns)


class _Walk:
    """One pass over all boxes; `_readers` are called for theirs."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._boxes = 0
        self._samples = 0
        self.has_index = False
        self.seconds: float | None = None
        self.movie_turn: Turn = _IDENTITY
        self.turns: dict[int, Turn] = {}
        self._readers: dict[bytes, Callable[[Box], None]] = {
            b"mvhd": self._movie_header,
            b"tkhd": self._track_header,
            b"dref": self._data_references,
            b"elst": self._edits,
            b"stsd": self._descriptions,
            b"stsz": self._sizes,
            b"stz2": self._compact_sizes,
            b"trun": self._fragment,
        }

    def descend(self, start: int, end: int, depth: int) -> None:
        """Reads the boxes of one level and those below. Raises BoxError."""
        if depth > DEPTH_MAXIMUM:
            raise BoxError(f"its boxes are nested more than {DEPTH_MAXIMUM} deep")
        for box in children(self._data, start, end):
            self._boxes += 1
            if self._boxes > BOXES_MAXIMUM:
                raise BoxError(f"it has more than {BOXES_MAXIMUM} boxes")
            self._read(box, depth)

    def _read(self, box: Box, depth: int) -> None:
        if box.type in _REFUSED:
            raise BoxError(f"it has {_REFUSED[box.type]} ({box.name})")
        if box.type == b"moov":
            self.has_index = True
        if box.type in _ENTRY_BYTES:
            self._table(box)
        elif box.type in self._readers:
            self._readers[box.type](box)
        if box.type in _CONTAINERS:
            self.descend(box.start, box.end, depth + 1)
        elif box.type == b"meta":
            # Of ISO files it begins with a version, of QuickTime's not; FFmpeg looks for this box in either.
            first = self._data.find(b"hdlr", box.start, box.end)
            if first >= box.start + 4:
                self.descend(first - 4, box.end, depth + 1)

    def _integer(self, box: Box, offset: int, size: int = 4) -> int:
        at = box.start + offset
        if at + size > box.end:
            raise BoxError(f"its box {box.name!r} is too short")
        return int.from_bytes(self._data[at : at + size], "big")

    def _entries(self, box: Box, count: int, offset: int, entry_bytes: int) -> None:
        if count > SAMPLES_MAXIMUM or offset + count * entry_bytes > box.size:
            raise BoxError(f"its table {box.name!r} claims {count} entries in {box.size} bytes")

    def _column(self, box: Box, count: int, words: int, column: int) -> NDArray[np.uint64]:
        table = np.frombuffer(self._data, ">u4", count * words, box.start + 8).reshape(count, words)
        return table[:, column].astype(np.uint64)

    def _table(self, box: Box) -> None:
        count = self._integer(box, 4)
        entry_bytes = _ENTRY_BYTES[box.type]
        self._entries(box, count, 8, entry_bytes)
        if box.type in (b"stts", b"ctts"):
            self._check_samples(box, int(self._column(box, count, 2, 0).sum()))
        if box.type == b"stsc":
            self._check_samples(box, int(self._column(box, count, 3, 1).max(initial=np.uint64(0))))

    def _check_samples(self, box: Box, samples: int) -> None:
        if samples > SAMPLES_MAXIMUM:
            raise BoxError(f"its table {box.name!r} claims {samples} samples, a clip has at most {SAMPLES_MAXIMUM}")

    def _add_samples(self, box: Box, samples: int) -> None:
        self._samples += samples
        self._check_samples(box, self._samples)

    def _sizes(self, box: Box) -> None:
        same, count = self._integer(box, 4), self._integer(box, 8)
        self._entries(box, count, 12, 0 if same else 4)
        self._add_samples(box, count)

    def _compact_sizes(self, box: Box) -> None:
        bits, count = self._integer(box, 7, 1), self._integer(box, 8)
        self._entries(box, count, 12, 0)
        if bits not in (4, 8, 16) or 12 + (count * bits + 7) // 8 > box.size:
            raise BoxError(f"its table {box.name!r} claims {count} entries of {bits} bits in {box.size} bytes")
        self._add_samples(box, count)

    def _fragment(self, box: Box) -> None:
        flags, count = self._integer(box, 1, 3), self._integer(box, 4)
        fields = sum(bool(flags & flag) for flag in (0x100, 0x200, 0x400, 0x800))
        head = 8 + sum(4 for flag in (0x1, 0x4) if flags & flag)
        self._entries(box, count, head, 4 * fields)
        self._add_samples(box, count)

    def _edits(self, box: Box) -> None:
        self._entries(box, self._integer(box, 4), 8, 20 if self._integer(box, 0, 1) else 12)

    def _descriptions(self, box: Box) -> None:
        inside = self._data[box.start : box.end]
        hidden = [name for name in _NEVER_IN_DESCRIPTIONS if name in inside]
        if hidden:
            raise BoxError(f"its sample descriptions hide a box {hidden[0].decode()!r}")

    def _data_references(self, box: Box) -> None:
        for entry in children(self._data, box.start + 8, box.end):
            # The first flag says that the samples are in this file.
            if not self._integer(entry, 0) & 1:
                raise BoxError("its samples are in another file, which is never opened: it must hold its own media")

    def _movie_header(self, box: Box) -> None:
        wide = self._integer(box, 0, 1) == 1
        scale = self._integer(box, 20 if wide else 12)
        duration = self._integer(box, 24, 8) if wide else self._integer(box, 16)
        if scale and duration not in _UNKNOWN_DURATIONS:
            self.seconds = duration / scale
        self.movie_turn = self._turn(box, 48 if wide else 36)

    def _track_header(self, box: Box) -> None:
        wide = self._integer(box, 0, 1) == 1
        track = self._integer(box, 20 if wide else 12)
        self.turns[track] = self._turn(box, 52 if wide else 40)

    def _turn(self, box: Box, offset: int) -> Turn:
        a, b, c, d = (self._fixed(box, offset + 4 * index) for index in (0, 1, 3, 4))
        turn = (_sign(a), _sign(b), _sign(c), _sign(d))
        # Anything but a quarter turn or a mirror, zeros included, is shown as it is coded.
        return turn if turn in _TURNS else _IDENTITY

    def _fixed(self, box: Box, offset: int) -> float:
        value = self._integer(box, offset)
        return (value - (1 << 32 if value >> 31 else 0)) / _FIXED_POINT


_TURNS = (
    (1, 0, 0, 1),
    (0, 1, -1, 0),
    (-1, 0, 0, -1),
    (0, -1, 1, 0),
    (-1, 0, 0, 1),
    (1, 0, 0, -1),
    (0, 1, 1, 0),
    (0, -1, -1, 0),
)


def _sign(value: float) -> int:
    return 0 if abs(value) < 0.5 else (1 if value > 0 else -1)


def _product(first: Turn, then: Turn) -> Turn:
    """The turn that does `first`, and `then` on its result; points are rows."""
    a, b, c, d = first
    p, q, r, s = then
    return (a * p + b * r, a * q + b * s, c * p + d * r, c * q + d * s)
