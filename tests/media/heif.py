"""HEIC files written box by box (ISO/IEC 23008-12) around x265's intra frames: no encoder of HEIF is installed."""

from __future__ import annotations

import io

import av
import numpy as np
from numpy.typing import NDArray

from tests.media.clips import video


def box(name: bytes, *parts: bytes) -> bytes:
    """One box."""
    body = b"".join(parts)
    return (len(body) + 8).to_bytes(4, "big") + name + body


def full(name: bytes, version: int, flags: int, *parts: bytes) -> bytes:
    """One box with a version and flags."""
    return box(name, bytes([version]), flags.to_bytes(3, "big"), *parts)


def heic(
    pixels: NDArray[np.uint8], *, turns: int = 0, grid: bool = False, claimed: tuple[int, int] | None = None
) -> bytes:
    """A still [h, w, 3]. turns: anticlockwise quarter turns a viewer must make; grid: of 2 x 2 tiles, as phones write.

    claimed: the (width, height) that the header says instead of the true one.
    """
    height, width = pixels.shape[:2]
    halves = (height // 2, width // 2)
    tiles = [pixels[y : y + halves[0], x : x + halves[1]] for y in (0, halves[0]) for x in (0, halves[1])]
    coded = [_coded(tile) for tile in (tiles if grid else [pixels])]
    says = claimed or (width, height)
    tile_size = (halves[1], halves[0]) if grid else says
    properties = [box(b"hvcC", coded[0][0]), _extent(*tile_size), _extent(*says), box(b"irot", bytes([turns]))]
    items = [(index + 1, b"hvc1", sample, (1, 2)) for index, (_, sample) in enumerate(coded)]
    if grid:
        descriptor = bytes([0, 0, 1, 1]) + says[0].to_bytes(2, "big") + says[1].to_bytes(2, "big")
        items.append((5, b"grid", descriptor, (3, 4)))
    else:
        items = [(1, b"hvc1", coded[0][1], (1, 2, 4))]
    return _file(items, properties, grid)


def _file(items: list[tuple[int, bytes, bytes, tuple[int, ...]]], properties: list[bytes], grid: bool) -> bytes:
    head = box(b"ftyp", b"heic", bytes(4), b"mif1heic")
    names = [full(b"infe", 2, 0, _16(number), _16(0), kind, b"\0") for number, kind, _, _ in items]
    wanted = [_16(number) + bytes([len(used), *used]) for number, _, _, used in items]
    tiles = b"".join(_16(number) for number, kind, _, _ in items if kind == b"hvc1")
    references = [full(b"iref", 0, 0, box(b"dimg", _16(5), _16(4), tiles))] if grid else []
    start = 0
    for _ in range(2):  # The second time the length of what comes before the media is known.
        places, at = [], start
        for number, _, payload, _ in items:
            places.append(_16(number) + _16(0) + _16(1) + at.to_bytes(4, "big") + len(payload).to_bytes(4, "big"))
            at += len(payload)
        meta = full(
            b"meta",
            0,
            0,
            full(b"hdlr", 0, 0, bytes(4), b"pict", bytes(12), b"\0"),
            full(b"pitm", 0, 0, _16(items[-1][0])),
            full(b"iinf", 0, 0, _16(len(items)), *names),
            *references,
            box(b"iprp", box(b"ipco", *properties), full(b"ipma", 0, 0, len(items).to_bytes(4, "big"), *wanted)),
            full(b"iloc", 0, 0, bytes([0x44, 0]), _16(len(items)), *places),
        )
        start = len(head) + len(meta) + 8
    return head + meta + box(b"mdat", *(payload for _, _, payload, _ in items))


def _coded(pixels: NDArray[np.uint8]) -> tuple[bytes, bytes]:
    """The decoder configuration and the one sample of an intra frame."""
    # A lone frame leaves x265 with decoding times that it never set.
    encoder = {"crf": "4", "x265-params": "log-level=none:bframes=0"}
    clip = video([0, 3750], size=pixels.shape[1::-1], codec="libx265", pixels=pixels, encoder=encoder)
    with av.open(io.BytesIO(clip)) as container:
        stream = container.streams.video[0]
        packet = next(container.demux(stream))
        return bytes(stream.codec_context.extradata or b""), bytes(packet)


def _extent(width: int, height: int) -> bytes:
    return full(b"ispe", 0, 0, width.to_bytes(4, "big"), height.to_bytes(4, "big"))


def _16(value: int) -> bytes:
    return value.to_bytes(2, "big")
