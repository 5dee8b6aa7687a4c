"""Opens a media file in memory with FFmpeg: one named demuxer, no other file or protocol, bounded frames."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NoReturn

import av
from av.container import InputContainer
from av.packet import Packet
from av.stream import Discard, Stream

from runtime.media.limits import SIDES

Demuxer = Literal["mov", "wav", "mp3"]

PACKETS_MAXIMUM = 1 << 16
"""Read from one track: 15 s of 60 frames a second make 900."""

_MARGIN = 128
"""Pixels that a decoder may add to a side for whole blocks and alignment."""


def pixels_limit(width: int, height: int) -> dict[str, str]:
    """The codec options that make FFmpeg refuse frames larger than width x height."""
    return {"max_pixels": str((width + _MARGIN) * (height + _MARGIN)), "threads": "1"}


@contextmanager
def opened(data: bytes, demuxer: Demuxer) -> Iterator[InputContainer]:
    """The file as a container. Raises FFmpeg's errors; a format is never guessed and nothing else is ever opened."""
    container = av.open(
        io.BytesIO(data),
        mode="r",
        format=demuxer,
        options=pixels_limit(SIDES[1], SIDES[1]),
        # Data in another file stay unread by default; that, and no protocol at all, is stated here once more.
        container_options={"protocol_whitelist": "none", "format_whitelist": demuxer},
        metadata_errors="replace",
        io_open=_never,
    )
    with container:
        yield container


def packets(container: InputContainer, stream: Stream, bytes_maximum: int) -> Iterator[Packet]:
    """The packets of one track, in decoding order. Raises ValueError where they are damaged or more than the file.

    Samples may overlap in a hostile file, so that reading them all would take forever.
    """
    for other in container.streams:
        other.discard = Discard.default if other.index == stream.index else Discard.all
    total = 0
    for count, packet in enumerate(container.demux(stream)):
        total += packet.size
        if packet.is_corrupt:
            raise ValueError("a sample is cut off: truncated")
        if count > PACKETS_MAXIMUM or total > bytes_maximum:
            raise ValueError("its samples are more than the whole file")
        yield packet


def _never(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("a media file may not open another one")
