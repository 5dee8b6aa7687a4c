"""Which format a file has, by its first bytes and never by its name."""

from __future__ import annotations

from runtime.media.facts import Kind
from runtime.media.limits import LIMITS, check_bytes
from runtime.refusal import RequestError

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"OggS", "Ogg"),
    (b"fLaC", "FLAC"),
    (b"\x1aE\xdf\xa3", "Matroska"),
    (b"#EXTM3U", "a playlist"),
    (b"ffconcat", "a playlist"),
    (b"RF64", "RF64"),
    (b"PK\x03\x04", "ZIP"),
    (b"ID3", "MP3"),
)
_RIFF = {b"WAVE": "WAV", b"WEBP": "WEBP", b"AVI ": "AVI"}
_STILL_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"mif1", b"mif2", b"heif")
_SEQUENCE_BRANDS = (b"hevc", b"hevx", b"msf1")
_QUICKTIME_FIRST = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")


def format_of(data: bytes) -> str | None:
    """The format that the first bytes are of, None where they are of none that is known."""
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF":
        return _RIFF.get(bytes(data[8:12]), "RIFF")
    if data[4:8] == b"ftyp":
        return _brand(bytes(data[8:12]))
    if data[4:8] in _QUICKTIME_FIRST:
        return "MOV"
    if data.lstrip()[:5].lower() in (b"<?xml", b"<svg ", b"<svg>"):
        return "XML or SVG"
    return "MP3" if _is_mpeg_layer_3(data) else None


def check_format(data: bytes, kind: Kind, where: str) -> str:
    """The format of a file whose size and format its kind may have. Raises RequestError."""
    check_bytes(len(data), kind, where)
    found = format_of(data)
    if found in LIMITS[kind].formats:
        return str(found)
    shown = found or f"bytes beginning {bytes(data[:8])!r}"
    rule = f"must be {LIMITS[kind].formats_text}, told by the content and not by the name"
    raise RequestError(where, shown, rule)


def _brand(brand: bytes) -> str:
    if brand in _STILL_BRANDS:
        return "HEIC"
    if brand in _SEQUENCE_BRANDS:
        return "an HEIF image sequence"
    if brand in (b"avif", b"avis"):
        return "AVIF"
    return "MOV" if brand == b"qt  " else "MP4"


def _is_mpeg_layer_3(data: bytes) -> bool:
    """Whether the bytes begin with a frame header of MPEG audio, layer III (ISO/IEC 11172-3, 2.4.1.3)."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return False
    version, layer = data[1] >> 3 & 3, data[1] >> 1 & 3
    return version != 1 and layer == 1 and data[2] >> 4 not in (0, 15) and data[2] >> 2 & 3 != 3
