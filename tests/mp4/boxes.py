"""An own reader of MP4 boxes (ISO 14496-12), independent of ffmpeg: the samples of each track, fragmented or not."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

CONTAINERS = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf", b"mvex", b"edts"}


@dataclass
class Track:
    """A track's handler ("vide" or "soun"), units a second, and its samples: bytes, decoding time, duration."""

    handler: str = ""
    timescale: int = 0
    samples: list[bytes] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)


def boxes(data: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """Type, start and end of the content of each box between two places."""
    at, end = start, len(data) if end is None else end
    while at < end:
        size, kind = struct.unpack_from(">I4s", data, at)
        assert size >= 8, f"box {kind!r} of {size} bytes at {at}"
        yield kind, at + 8, at + size
        at += size
    assert at == end, "boxes end where their parent does"


def fragments(data: bytes) -> list[dict[str, Track]]:
    """The samples of each movie fragment, by handler."""
    known = _tracks(data)
    found = []
    for kind, start, end in boxes(data):
        if kind == b"moof":
            found.append({track.handler: track for track in _fragment(data, start - 8, start, end, known)})
    return found


def tracks(data: bytes) -> dict[str, Track]:
    """All samples of each track, by handler, from the index of a file or from its fragments."""
    known = _tracks(data)
    whole = {track.handler: track for track in known.values()}
    for fragment in fragments(data):
        for handler, part in fragment.items():
            whole[handler].samples += part.samples
            whole[handler].times += part.times
            whole[handler].durations += part.durations
    return whole


def _tracks(data: bytes) -> dict[int, Track]:
    moov = next((start, end) for kind, start, end in boxes(data) if kind == b"moov")
    found = {}
    for kind, start, end in boxes(data, *moov):
        if kind == b"trak":
            identity, track = _track(data, start, end)
            found[identity] = track
    return found


def _track(data: bytes, start: int, end: int) -> tuple[int, Track]:
    inner = dict(_leaves(data, start, end))
    track = Track(data[inner[b"hdlr"][0] + 8 :][:4].decode())
    (track.timescale,) = struct.unpack_from(">I", data, inner[b"mdhd"][0] + 12)
    (identity,) = struct.unpack_from(">I", data, inner[b"tkhd"][0] + 12)
    _read_index(data, inner, track)
    return identity, track


def _leaves(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, tuple[int, int]]]:
    for kind, inner, outer in boxes(data, start, end):
        if kind in CONTAINERS:
            yield from _leaves(data, inner, outer)
        else:
            yield kind, (inner, outer)


def _read_index(data: bytes, inner: dict[bytes, tuple[int, int]], track: Track) -> None:
    """The samples that stsz, stsc, stco and stts tell of; none in a fragmented file."""
    at = inner[b"stsz"][0]
    fixed, count = struct.unpack_from(">II", data, at + 4)
    sizes = [fixed] * count if fixed else list(struct.unpack_from(f">{count}I", data, at + 12))
    at = inner[b"stco"][0]
    offsets = struct.unpack_from(f">{struct.unpack_from('>I', data, at + 4)[0]}I", data, at + 8)
    at = inner[b"stsc"][0]
    entries = [
        struct.unpack_from(">III", data, at + 8 + 12 * i) for i in range(*struct.unpack_from(">I", data, at + 4))
    ]
    for number, offset in enumerate(offsets, start=1):
        for _ in range([samples for first, samples, _ in entries if first <= number][-1]):
            size = sizes[len(track.samples)]
            track.samples.append(data[offset : offset + size])
            offset += size
    at = inner[b"stts"][0]
    for i in range(*struct.unpack_from(">I", data, at + 4)):
        samples, duration = struct.unpack_from(">II", data, at + 8 + 8 * i)
        track.durations += [duration] * samples
    track.times = [sum(track.durations[:place]) for place in range(len(track.durations))]


def _fragment(data: bytes, moof: int, start: int, end: int, known: dict[int, Track]) -> Iterator[Track]:
    for kind, inner, outer in boxes(data, start, end):
        if kind != b"traf":
            continue
        parts = {kind: place for kind, place, _ in boxes(data, inner, outer)}
        flags, identity = struct.unpack_from(">II", data, parts[b"tfhd"])
        assert flags & 0x20000, "default-base-is-moof: offsets count from the fragment"
        assert not flags & 0x1, "no base data offset"
        track = Track(known[identity].handler, known[identity].timescale)
        at, defaults = parts[b"tfhd"] + 8, {}
        for bit, name in ((0x2, "description"), (0x8, "duration"), (0x10, "size"), (0x20, "flags")):
            if flags & bit:
                (defaults[name],) = struct.unpack_from(">I", data, at)
                at += 4
        version = data[parts[b"tfdt"]]
        (time,) = struct.unpack_from(">Q" if version else ">I", data, parts[b"tfdt"] + 4)
        _read_run(data, parts[b"trun"], moof, time, defaults, track)
        yield track


def _read_run(data: bytes, at: int, moof: int, time: int, defaults: dict[str, int], track: Track) -> None:
    flags, count, offset = struct.unpack_from(">IIi", data, at)
    assert flags & 0x1, "the run says where its data are"
    place, at = moof + offset, at + 12 + (4 if flags & 0x4 else 0)
    for _ in range(count):
        fields = dict(defaults)
        for bit, name in ((0x100, "duration"), (0x200, "size"), (0x400, "flags"), (0x800, "shift")):
            if flags & bit:
                (fields[name],) = struct.unpack_from(">I", data, at)
                at += 4
        track.samples.append(data[place : place + fields["size"]])
        track.times.append(time)
        track.durations.append(fields["duration"])
        place, time = place + fields["size"], time + fields["duration"]
