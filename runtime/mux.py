"""Streaming MP4 writer: frames in chunks and one soundtrack in, H.264 and AAC out, in a file that plays as it loads."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from types import TracebackType
from typing import TYPE_CHECKING

import av
import numpy as np
import torch
from av.codec.context import Flags
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation, VideoReformatter

from plugins.dimensions import AUDIO_CHANNELS, FRAMES_PER_SECOND
from runtime.contract import CRF_RANGE, PRESETS

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import OutputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

AUDIO_BITRATE_RANGE = (32_000, 384_000)
"""Legal AAC bit rates; above, a stereo frame at 32 kHz would exceed the 6144 bits a channel that AAC allows."""

THREADS_RANGE = (1, 64)

_AVC_BT709 = 1

# A whole number of units for a frame and for a sample, so that edit lists and durations are exact.
_MOVIE_TIMESCALE = 96_000

# swscale's default path is approximate and differs between processors; these flags make it exact.
_CONVERSION = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.BITEXACT


class MuxError(ValueError):
    """Media or options that cannot be written; the message names the field, the value and the rule."""


@dataclass(frozen=True)
class MediaOptions:
    """Encoder settings. All of them, threads included, decide the bytes: x264 gives other bits on other thread counts.

    crf: constant rate factor. preset: of libx264. threads: of libx264, stated and not taken from the machine.
    audio_bitrate: bits a second of the stereo AAC track. Raises MuxError outside the legal ranges.
    """

    crf: int
    preset: str
    audio_bitrate: int
    threads: int = 4

    def __post_init__(self) -> None:
        """Check every field against its range."""
        _check_range("crf", self.crf, CRF_RANGE)
        _check_range("threads", self.threads, THREADS_RANGE)
        _check_range("audio_bitrate", self.audio_bitrate, AUDIO_BITRATE_RANGE)
        if self.preset not in PRESETS:
            raise MuxError(f"preset: {self.preset!r} is not one of {', '.join(PRESETS)}")


class Mp4Writer:
    """Encodes chunks of frames as they come, takes the soundtrack at any time, and returns the finished MP4.

    Use it as a context manager; leaving it by an exception releases the encoders and discards what was encoded.
    Nothing touches the disk: only compressed packets are kept, until both tracks are known and can be interleaved.

        with Mp4Writer(width, height, sample_rate, options) as writer:
            for chunk in chunks:
                writer.write_frames(chunk)
            writer.write_audio(waveform)
            mp4 = writer.finish()

    The same input and options give the same bytes with one build of the encoders: no date, no property of the machine.
    """

    def __init__(self, width: int, height: int, sample_rate: int, options: MediaOptions) -> None:
        """Open the encoders for frames of width x height pixels (both even) at 24 a second; raises MuxError."""
        if width <= 0 or height <= 0 or width % 2 or height % 2:
            raise MuxError(f"size: {width}x{height} must be positive and even, H.264 4:2:0 halves both sides")
        self._size = (height, width)
        self._rate = sample_rate
        self._buffer = io.BytesIO()
        self._container = _open_container(self._buffer)
        self._video = _video_stream(self._container, width, height, options)
        self._audio = _audio_stream(self._container, sample_rate, options)
        self._reformatter = VideoReformatter()
        self._packets: list[Packet] = []
        self._frames = 0
        self._samples = 0
        self._closed = False

    def __enter__(self) -> Mp4Writer:
        """The writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the encoders and whatever they hold."""
        self._close()

    @property
    def frames(self) -> int:
        """Frames taken so far."""
        return self._frames

    def write_frames(self, frames: torch.Tensor) -> None:
        """Encode the next frames: uint8 [n, height, width, 3] RGB on the CPU. Raises MuxError."""
        self._check_open()
        if frames.dtype != torch.uint8 or frames.ndim != 4 or tuple(frames.shape[1:]) != (*self._size, 3):
            height, width = self._size
            raise MuxError(f"frames: {frames.dtype} {tuple(frames.shape)} is not uint8 [n, {height}, {width}, 3]")
        for pixels in frames.numpy():
            self._keep(self._video, self._video.codec_context.encode(self._converted(pixels)))
            self._frames += 1

    def write_audio(self, waveform: torch.Tensor) -> None:
        """Encode the soundtrack, once: float32 [2, samples] in [-1, 1] on the CPU, left first. Raises MuxError."""
        self._check_open()
        if self._samples:
            raise MuxError("audio: the soundtrack has been written already")
        if waveform.dtype != torch.float32 or waveform.ndim != 2 or waveform.shape[0] != AUDIO_CHANNELS:
            raise MuxError(f"audio: {waveform.dtype} {tuple(waveform.shape)} is not float32 [2, samples]")
        if not waveform.numel() or not bool(torch.isfinite(waveform).all()):
            raise MuxError(f"audio: {waveform.shape[1]} samples must be at least one and all finite")
        frame = av.AudioFrame.from_ndarray(waveform.contiguous().numpy(), format="fltp", layout="stereo")
        frame.sample_rate, frame.time_base, frame.pts = self._rate, Fraction(1, self._rate), 0
        self._keep(self._audio, self._audio.codec_context.encode(frame))
        self._samples = waveform.shape[1]

    def finish(self) -> bytes:
        """Flush both encoders, interleave, and return the MP4 with its index (moov) in front. Raises MuxError."""
        self._check_open()
        if not self._frames or not self._samples:
            raise MuxError(f"finish: needs frames and a soundtrack, got {self._frames} frames, {self._samples} samples")
        for stream in (self._video, self._audio):
            self._keep(stream, stream.codec_context.encode(None))
        # In decoding order, so that a player never reads far ahead for the other track.
        for packet in sorted(self._packets, key=_decoding_time):
            self._container.mux(packet)
        self._container.close()
        mp4 = self._buffer.getvalue()
        self._close()
        return mp4

    def _converted(self, pixels: np.ndarray) -> av.VideoFrame:
        """One frame as limited-range BT.709 4:2:0, time-stamped."""
        rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
        frame = self._reformatter.reformat(
            rgb,
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            src_color_range=ColorRange.JPEG,
            dst_color_range=ColorRange.MPEG,
            interpolation=_CONVERSION,
            threads=1,
        )
        frame.pts, frame.time_base = self._frames, Fraction(1, FRAMES_PER_SECOND)
        return frame

    def _keep(self, stream: VideoStream | AudioStream, packets: list[Packet]) -> None:
        for packet in packets:
            packet.stream = stream
            self._packets.append(packet)

    def _check_open(self) -> None:
        if self._closed:
            raise MuxError("writer: closed, a new one is needed for another clip")

    def _close(self) -> None:
        self._closed = True
        self._packets.clear()
        self._container.close()
        self._buffer.close()


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


def _open_container(buffer: io.BytesIO) -> OutputContainer:
    options = {"movflags": "+faststart", "fflags": "+bitexact", "movie_timescale": str(_MOVIE_TIMESCALE)}
    return av.open(buffer, "w", format="mp4", container_options=options, io_open=_reopener(buffer))


def _video_stream(container: OutputContainer, width: int, height: int, options: MediaOptions) -> VideoStream:
    stream = container.add_stream(
        "libx264", rate=FRAMES_PER_SECOND, options={"crf": str(options.crf), "preset": options.preset}
    )
    context = stream.codec_context
    context.width, context.height, context.pix_fmt = width, height, "yuv420p"
    context.time_base = Fraction(1, FRAMES_PER_SECOND)
    context.thread_count = options.threads
    context.color_range, context.colorspace = ColorRange.MPEG, _AVC_BT709
    context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    return stream


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


def _check_range(field: str, value: int, legal: tuple[int, int]) -> None:
    low, high = legal
    if not low <= value <= high:
        raise MuxError(f"{field}: {value} is outside {low}..{high}; the nearest is {min(max(value, low), high)}")
