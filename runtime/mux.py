"""Streaming MP4 writer: frames in chunks behind one soundtrack, H.264 and AAC out, in one of two kinds of MP4.

faststart: one piece when all is encoded, its index in front. fragmented: pieces as they are made, each with its sound.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import av
import numpy as np
from av.codec.context import Flags
from av.video.reformatter import ColorPrimaries, ColorRange, ColorTrc
from numpy.typing import NDArray

from plugins.dimensions import AUDIO_CHANNELS, FRAMES_PER_SECOND
from runtime.contract import COLOURS, CONTAINERS, CRF_RANGE, PRESETS, VIDEO_BITRATE_RANGE

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import OutputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

AUDIO_BITRATE_RANGE = (32_000, 384_000)
"""Legal AAC bit rates; above, a stereo frame at 32 kHz would exceed the 6144 bits a channel that AAC allows."""

THREADS_RANGE = (1, 64)

FRAGMENT_SECONDS = 0.5
"""Of a fragment: 12 frames and their sound. The last one is shorter."""

Deliver = Callable[[bytes], None]
"""Takes the next piece of a file."""

_AVC_BT709 = 1

# A whole number of units for a frame and for a sample, so that edit lists and durations are exact.
_MOVIE_TIMESCALE = 96_000


class MuxError(ValueError):
    """Media or options that cannot be written; the message names the field, the value and the rule."""


@dataclass(frozen=True)
class MediaOptions:
    """Encoder settings. All of them, threads included, decide the bytes: x264 gives other bits on other thread counts.

    crf: constant rate factor; or video_bitrate: bits a second on average. Exactly one of them. preset: of libx264.
    threads: of libx264, stated and not taken from the machine. audio_bitrate: bits a second of the stereo AAC track.
    container: of CONTAINERS. colour: of COLOURS, what the planes are tagged as. Raises MuxError outside the legal
    values.
    """

    preset: str
    audio_bitrate: int
    crf: int | None = None
    video_bitrate: int | None = None
    container: str = CONTAINERS[0]
    colour: str = COLOURS[0]
    threads: int = 4

    def __post_init__(self) -> None:
        """Check every field against its range."""
        if (self.crf is None) == (self.video_bitrate is None):
            raise MuxError(f"crf: {self.crf} beside video_bitrate {self.video_bitrate}: give one of them")
        _check_range("crf", self.crf, CRF_RANGE)
        _check_range("video_bitrate", self.video_bitrate, tuple(1000 * end for end in VIDEO_BITRATE_RANGE))
        _check_range("threads", self.threads, THREADS_RANGE)
        _check_range("audio_bitrate", self.audio_bitrate, AUDIO_BITRATE_RANGE)
        for field, legal in (("preset", PRESETS), ("container", CONTAINERS), ("colour", COLOURS)):
            if getattr(self, field) not in legal:
                raise MuxError(f"{field}: {getattr(self, field)!r} is not one of {', '.join(legal)}")


class Mp4Writer:
    """Takes the soundtrack, then chunks of frames as they come, and delivers the MP4, in pieces where it is fragmented.

    Use it as a context manager; leaving it by an exception releases the encoders and discards what was encoded.
    Nothing touches the disk: only compressed packets are kept. Serves one thread at a time.

        pieces = []
        with Mp4Writer(width, height, sample_rate, options, pieces.append) as writer:
            writer.write_audio(waveform)
            for chunk in chunks:
                writer.write_frames(chunk)
            writer.finish()
        mp4 = b"".join(pieces)

    The same input and options give the same bytes with one build of the encoders: no date, no property of the machine.
    """

    def __init__(self, width: int, height: int, sample_rate: int, options: MediaOptions, deliver: Deliver) -> None:
        """Open the encoders for frames of width x height pixels (both even) at 24 a second; raises MuxError."""
        if width <= 0 or height <= 0 or width % 2 or height % 2:
            raise MuxError(f"size: {width}x{height} must be positive and even, H.264 4:2:0 halves both sides")
        self._size = (3 * height // 2, width)
        self._rate = sample_rate
        self._file: _Whole | _Fragments = _Whole() if options.container == "faststart" else _Fragments()
        self._deliver = deliver
        # The encoders live as long as anything refers to them: nothing else does for longer than a call.
        self._open: _Media | None = _Media.open(self._file.open(), width, height, sample_rate, options)
        self._sound: deque[Packet] = deque()
        self._frames = self._samples = 0

    def __enter__(self) -> Mp4Writer:
        """The writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the encoders and whatever they hold."""
        self.close()

    @property
    def frames(self) -> int:
        """Frames taken so far."""
        return self._frames

    def write_audio(self, waveform: NDArray[np.float32]) -> None:
        """Encode the soundtrack, once, before the frames: [2, samples] in [-1, 1], left first. Raises MuxError."""
        self._check_open()
        if self._samples:
            raise MuxError("audio: the soundtrack has been written already")
        if waveform.dtype != np.float32 or waveform.ndim != 2 or waveform.shape[0] != AUDIO_CHANNELS:
            raise MuxError(f"audio: {waveform.dtype} {waveform.shape} is not float32 [2, samples]")
        if not waveform.size or not np.isfinite(waveform).all():
            raise MuxError(f"audio: {waveform.shape[1]} samples must be at least one and all finite")
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(waveform), format="fltp", layout="stereo")
        frame.sample_rate, frame.time_base, frame.pts = self._rate, Fraction(1, self._rate), 0
        for given in (frame, None):
            self._sound.extend(self._check_open().audio.codec_context.encode(given))
        self._samples = waveform.shape[1]

    def write_frames(self, planes: NDArray[np.uint8]) -> None:
        """Encode the next frames: uint8 [n, 3 height / 2, width], see `runtime.colour.to_i420`. Raises MuxError."""
        self._check_open()
        if not self._samples:
            raise MuxError("frames: the soundtrack comes first, so that every piece of the file has its sound")
        if planes.dtype != np.uint8 or planes.ndim != 3 or planes.shape[1:] != self._size:
            rows, width = self._size
            raise MuxError(f"frames: {planes.dtype} {planes.shape} is not uint8 [n, {rows}, {width}]")
        for frame in planes:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="yuv420p")
            picture.pts, picture.time_base = self._frames, Fraction(1, FRAMES_PER_SECOND)
            self._frames += 1
            self._mux_pictures(self._check_open().video.codec_context.encode(picture))

    def finish(self) -> None:
        """Flush the encoder and deliver what is left of the file. Raises MuxError."""
        self._check_open()
        if not self._frames or not self._samples:
            raise MuxError(f"finish: needs frames and a soundtrack, got {self._frames} frames, {self._samples} samples")
        self._mux_pictures(self._check_open().video.codec_context.encode(None))
        while self._sound:
            self._mux_sound()
        self._check_open().container.close()
        self._hand_on(self._file.rest())
        self.close()

    def close(self) -> None:
        """Release the encoders and whatever they hold; what was not delivered is discarded."""
        self._sound.clear()
        if self._open is not None:
            self._open.container.close()
            self._open = None
        self._file.close()

    def _mux_pictures(self, packets: list[Packet]) -> None:
        """In decoding order, so that a player never reads far ahead for the other track."""
        while packets:
            while self._sound and _decoding_time(self._sound[0]) < _decoding_time(packets[0]):
                self._mux_sound()
            self._check_open().mux_picture(packets.pop(0))
            self._hand_on(self._file.made())

    def _mux_sound(self) -> None:
        self._check_open().mux_sound(self._sound.popleft())

    def _hand_on(self, piece: bytes) -> None:
        if piece:
            self._deliver(piece)

    def _check_open(self) -> _Media:
        if self._open is None:
            raise MuxError("writer: closed, a new one is needed for another clip")
        return self._open


@dataclass(frozen=True)
class _Media:
    """A muxer and the encoders of its two tracks."""

    container: OutputContainer
    video: VideoStream
    audio: AudioStream

    @classmethod
    def open(
        cls, container: OutputContainer, width: int, height: int, sample_rate: int, options: MediaOptions
    ) -> _Media:
        """Opens both encoders."""
        video = _video_stream(container, width, height, options)
        return cls(container, video, _audio_stream(container, sample_rate, options))

    def mux_picture(self, packet: Packet) -> None:
        """Writes an encoded picture."""
        packet.stream = self.video
        self.container.mux(packet)

    def mux_sound(self, packet: Packet) -> None:
        """Writes encoded sound."""
        packet.stream = self.audio
        self.container.mux(packet)


class _Whole:
    """A file that is put together in memory, its index moved in front at the end."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()

    def open(self) -> OutputContainer:
        """The muxer that writes into it."""
        return _open_container(self._buffer, {"movflags": "+faststart"}, _reopener(self._buffer))

    def made(self) -> bytes:
        """Nothing is final before the end."""
        return b""

    def rest(self) -> bytes:
        """The file."""
        return self._buffer.getvalue()

    def close(self) -> None:
        """Frees the memory."""
        self._buffer.close()


class _Fragments:
    """A file whose pieces leave as they are written: the head with the first fragment, the table of all with the last.

    The muxer writes the head when it cuts the first fragment, because only then it knows both tracks' first times.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def open(self) -> OutputContainer:
        """The muxer that writes into it."""
        flags = {"movflags": "+empty_moov+delay_moov+default_base_moof"}
        return _open_container(self, flags | {"frag_duration": str(round(FRAGMENT_SECONDS * 1_000_000))})

    def write(self, data: bytes) -> int:
        """Takes the muxer's next bytes."""
        self._bytes += data
        return len(data)

    def made(self) -> bytes:
        """What there is up to the end of the last whole fragment, once."""
        end = at = 0
        # ISO 14496-12 4.2: a box begins with its size and type; a fragment ends with its `mdat`.
        while (size := int.from_bytes(self._bytes[at : at + 4], "big")) and at + size <= len(self._bytes):
            end = at + size if self._bytes[at + 4 : at + 8] == b"mdat" else end
            at += size
        piece = bytes(self._bytes[:end])
        del self._bytes[:end]
        return piece

    def rest(self) -> bytes:
        """Everything that has not left."""
        return bytes(self._bytes)

    def close(self) -> None:
        """Frees the memory."""
        self._bytes.clear()


class _Reread:
    """A reader over a buffer that is being written: the muxer moves the media back to make room for its index."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self._buffer = buffer
        self._at = 0

    def read(self, size: int) -> bytes:
        """Up to `size` bytes from the reader's own place; the writer's is left where it was."""
        writing_at = self._buffer.tell()
        self._buffer.seek(self._at)
        data = self._buffer.read(size)
        self._at = self._buffer.tell()
        self._buffer.seek(writing_at)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the reader's place."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._buffer.getbuffer().nbytes}[whence]
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        """The reader's place."""
        return self._at


def _reopener(buffer: io.BytesIO) -> Callable[[str, int, dict[str, str]], _Reread]:
    return lambda url, flags, options: _Reread(buffer)


def _open_container(
    file: io.BytesIO | _Fragments,
    options: dict[str, str],
    io_open: Callable[[str, int, dict[str, str]], _Reread] | None = None,
) -> OutputContainer:
    settings = {"fflags": "+bitexact", "movie_timescale": str(_MOVIE_TIMESCALE)} | options
    return av.open(file, "w", format="mp4", container_options=settings, io_open=io_open)


def _video_stream(container: OutputContainer, width: int, height: int, options: MediaOptions) -> VideoStream:
    settings = {"preset": options.preset} | _x264_instructions()
    if options.crf is not None:
        settings["crf"] = str(options.crf)
    stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND, options=settings)
    context = stream.codec_context
    context.width, context.height, context.pix_fmt = width, height, "yuv420p"
    context.time_base = Fraction(1, FRAMES_PER_SECOND)
    context.thread_count = options.threads
    if options.video_bitrate is not None:
        context.bit_rate = options.video_bitrate
    if options.colour == "bt709":
        context.color_range, context.colorspace = ColorRange.MPEG, _AVC_BT709
        context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    return stream


@cache
def _x264_instructions() -> dict[str, str]:
    """Keeps x264 from its AVX-512 code, whose macroblock tree depends on what its memory held before.

    Of widths off the 128 px grid, 1344 among them, the same frames would give other bytes from time to time. Its AVX2
    code costs a few percent and gives the bytes of plain C.
    """
    cpu = Path("/proc/cpuinfo")
    return {"x264-params": "asm=avx2"} if cpu.exists() and "avx512f" in cpu.read_text() else {}


def _audio_stream(container: OutputContainer, sample_rate: int, options: MediaOptions) -> AudioStream:
    stream = container.add_stream("aac", rate=sample_rate, layout="stereo")
    context = stream.codec_context
    context.bit_rate, context.profile = options.audio_bitrate, "LC"
    context.time_base = Fraction(1, sample_rate)
    # Without it the encoder writes its version into the stream.
    context.flags |= Flags.bitexact
    return stream


def _decoding_time(packet: Packet) -> Fraction:
    return Fraction(packet.dts or 0) * packet.time_base


def _check_range(field: str, value: int | None, legal: tuple[int, ...]) -> None:
    low, high = legal
    if value is not None and not low <= value <= high:
        raise MuxError(f"{field}: {value} is outside {low}..{high}; the nearest is {min(max(value, low), high)}")
