"""Headers of image files: size, orientation and whether the file is whole, read before a decoder sees it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from runtime.media import riff
from runtime.media.boxes import children

CHUNKS_MAXIMUM = 1 << 16
SCANS_MAXIMUM = 100
"""Of a progressive JPEG. Each costs a pass over all pixels, whatever its bytes; encoders write about ten."""

ORIENTATION = 0x0112
"""The EXIF tag."""

_PNG_HEADER = 13
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_JPEG_SOS, _JPEG_EOI, _JPEG_APP1 = 0xDA, 0xD9, 0xE1
_JPEG_FRAMES = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)
"""Baseline, extended and progressive, in Huffman or arithmetic codes."""
_JPEG_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF)
_WEBP_ANIMATION = 0x02
_SIDEWAYS = (5, 6, 7, 8)


class StillError(ValueError):
    """An image file that is not whole or not a still; the message is the rule that it breaks."""


@dataclass(frozen=True)
class Still:
    """width, height: pixels as stored. orientation: the EXIF value, 1 to 8, that a viewer must apply."""

    width: int
    height: int
    orientation: int = 1

    @property
    def shown(self) -> tuple[int, int]:
        """Width and height after the orientation."""
        return (self.height, self.width) if self.orientation in _SIDEWAYS else (self.width, self.height)


def read_still(data: bytes, name: str) -> Still:
    """The header of a whole image file of the named format. Raises StillError, BoxError or RiffError."""
    return _READERS[name](data)


def _png(data: bytes) -> Still:
    """PNG (third edition): every chunk is followed, none is unpacked."""
    at, count, seen, exif = 8, 0, set(), b""
    while b"IEND" not in seen:
        length, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if at + 12 + length > len(data) or count > CHUNKS_MAXIMUM:
            raise StillError("it is truncated, or a chunk claims more than the file has")
        if name == b"acTL":
            raise StillError("it is animated; send a still, or a video")
        if name == b"eXIf":
            exif = data[at + 8 : at + 8 + length]
        seen.add(name)
        at, count = at + 12 + length, count + 1
    if data[12:16] != b"IHDR" or int.from_bytes(data[8:12], "big") != _PNG_HEADER or b"IDAT" not in seen:
        raise StillError("it has no header (IHDR) or no pixels (IDAT)")
    return Still(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"), _orientation(exif))


def _jpeg(data: bytes) -> Still:
    """JPEG (ISO/IEC 10918-1): every marker up to the end of the image is followed."""
    at, scans, size, exif = 2, 0, None, b""
    while True:
        found = _JPEG_MARKER.search(data, at)
        if found is None:
            raise StillError("it is truncated: the marker that ends the image is missing")
        marker, at = data[found.start() + 1], found.end()
        if marker == _JPEG_EOI:
            break
        length = int.from_bytes(data[at : at + 2], "big")
        if length < 2 or at + length > len(data):
            raise StillError("it is truncated, or a segment claims more than the file has")
        segment = data[at + 2 : at + length]
        if marker == _JPEG_SOS:
            scans += 1
        elif marker in _JPEG_FRAMES and size is None:
            size = _jpeg_size(segment)
        elif marker in (*_JPEG_FRAMES, *_JPEG_OTHER_FRAMES):
            raise StillError("it is a lossless or hierarchical JPEG, which browsers do not show either")
        elif marker == _JPEG_APP1 and segment.startswith(b"Exif\0\0") and not exif:
            exif = segment
        if scans > SCANS_MAXIMUM:
            raise StillError(f"it has more than {SCANS_MAXIMUM} scans")
        at += length
    if size is None or not scans:
        raise StillError("it has no header (SOF) or no pixels (SOS)")
    return Still(*size, _orientation(exif))


def _jpeg_size(segment: bytes) -> tuple[int, int]:
    if len(segment) < 6 or segment[0] != 8:
        raise StillError("it must have 8 bits a sample")
    return int.from_bytes(segment[3:5], "big"), int.from_bytes(segment[1:3], "big")


def _webp(data: bytes) -> Still:
    """WEBP (RFC 9649): the canvas, which the bitstream inside must agree with."""
    if int.from_bytes(data[4:8], "little") + 8 > len(data):
        raise StillError("it is truncated: its header claims more than the file has")
    canvas, size, exif = None, None, b""
    for chunk in riff.chunks(data):
        payload = data[chunk.start : chunk.end]
        if chunk.name == b"VP8X" and canvas is None:
            if len(payload) < 10 or payload[0] & _WEBP_ANIMATION:
                raise StillError("it is animated; send a still, or a video")
            canvas = (1 + int.from_bytes(payload[4:7], "little"), 1 + int.from_bytes(payload[7:10], "little"))
        elif chunk.name in (b"VP8 ", b"VP8L") and size is None:
            size = _vp8_size(payload) if chunk.name == b"VP8 " else _vp8l_size(payload)
        elif chunk.name in (b"ANIM", b"ANMF"):
            raise StillError("it is animated; send a still, or a video")
        elif chunk.name == b"EXIF":
            exif = payload
    if size is None or canvas not in (None, size):
        raise StillError(f"its canvas of {canvas} px holds a picture of {size} px: truncated or lying")
    return Still(*size, _orientation(exif))


def _vp8_size(payload: bytes) -> tuple[int, int]:
    if payload[3:6] != b"\x9d\x01\x2a" or len(payload) < 10:
        raise StillError("its VP8 picture has no key frame")
    return int.from_bytes(payload[6:8], "little") & 0x3FFF, int.from_bytes(payload[8:10], "little") & 0x3FFF


def _vp8l_size(payload: bytes) -> tuple[int, int]:
    if payload[:1] != b"\x2f" or len(payload) < 5:
        raise StillError("its VP8L picture has no header")
    bits = int.from_bytes(payload[1:5], "little")
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


def _heic(data: bytes) -> Still:
    """HEIF (ISO/IEC 23008-12): the primary image, as libheif turns and mirrors it itself."""
    import pi_heif

    for box in children(data, 0, len(data)):
        if box.type == b"moov":
            raise StillError("it holds a sequence of images; send a still, or a video")
    return Still(*pi_heif.open_heif(data).size)


def _orientation(exif: bytes) -> int:
    """The orientation of an EXIF block, 1 where it has none or cannot be read, as viewers do."""
    parsed = Image.Exif()
    try:
        parsed.load(exif)
        value = parsed.get(ORIENTATION, 1)
    except Exception:  # Whatever a parser raises on hostile bytes, the picture is still a picture.
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


_READERS: dict[str, Callable[[bytes], Still]] = {"PNG": _png, "JPEG": _jpeg, "WEBP": _webp, "HEIC": _heic}
