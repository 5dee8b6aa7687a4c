"""Small media files, written by encoders: PyAV's muxers, Pillow and the standard library's wave module."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

TICKS = 90_000


@dataclass(frozen=True)
class Track:
    """A soundtrack to write: seconds of noise."""

    seconds: float
    codec: str = "aac"
    rate: int = 44_100
    layout: str = "stereo"


def grey(index: int) -> int:
    """The level of the index-th frame: far enough apart to be told after H.264."""
    return 16 + index * 7 % 220


def even(seconds: float, fps: Fraction | float) -> list[int]:
    """Ticks of frames at a constant rate."""
    return [round(Fraction(index) / Fraction(fps) * TICKS) for index in range(round(seconds * float(fps)))]


def video(
    stamps: Sequence[int] | None = None,
    *,
    size: tuple[int, int] = (256, 256),
    codec: str = "libx264",
    container: str = "mp4",
    track: Track | None = None,
    rotation: int = 0,
    aspect: Fraction | None = None,
    pixels: NDArray[np.uint8] | None = None,
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    encoder: dict[str, str] | None = None,
) -> bytes:
    """A clip whose frames are shown from `stamps` (ticks of 1/90000 s); flat greys by index, or `pixels` all along."""
    stamps = even(2.5, 24) if stamps is None else list(stamps)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, container_options=options or {}) as out:
        quiet = {"x265-params": "log-level=none"} if codec == "libx265" else {"preset": "veryfast"}
        stream = out.add_stream(codec, rate=24, options=quiet | (encoder or {}))
        stream.width, stream.height, stream.pix_fmt = *size, pix_fmt
        stream.time_base = stream.codec_context.time_base = Fraction(1, TICKS)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if rotation:
            stream.set_display_rotation(rotation)
        sound = None if track is None else _add_sound(out, track)
        for index, stamp in enumerate(stamps):
            flat = np.full((size[1], size[0], 3), grey(index), np.uint8) if pixels is None else pixels
            frame = av.VideoFrame.from_ndarray(flat, format="rgb24")
            frame.pts, frame.time_base = stamp, Fraction(1, TICKS)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        if sound is not None and track is not None:
            _write_sound(out, sound, track)
    return buffer.getvalue()


def noise(seconds: float, rate: int, channels: int) -> NDArray[np.float32]:
    """[channels, n] of noise in [-0.5, 0.5], always the same."""
    return (np.random.default_rng(7).random((channels, int(seconds * rate)), np.float32) - 0.5).astype(np.float32)


def wav(samples: NDArray[np.float32], rate: int) -> bytes:
    """A WAV file of 16-bit PCM by the standard library: samples [channels, n]."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setparams((samples.shape[0], 2, rate, 0, "NONE", ""))
        out.writeframes((samples.T * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def sound(samples: NDArray[np.float32], rate: int, codec: str, container: str) -> bytes:
    """A file of sound by FFmpeg's muxers: samples [channels, n]."""
    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[samples.shape[0]]
    with av.open(buffer, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout)
        _encode(out, stream, samples, layout, rate)
    return buffer.getvalue()


def picture(width: int = 300, height: int = 260) -> Image.Image:
    """A photograph-like RGB image, no two corners of which are alike."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 // width, y * 255 // height, (x * 3 + y * 5) % 256], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def saved(image: Image.Image, name: str, **options: object) -> bytes:
    """An image file by Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def _add_sound(out: av.container.OutputContainer, track: Track) -> av.audio.stream.AudioStream:
    return out.add_stream(track.codec, rate=track.rate, layout=track.layout)


def _write_sound(out: av.container.OutputContainer, stream: av.audio.stream.AudioStream, track: Track) -> None:
    channels = stream.codec_context.layout.nb_channels
    _encode(out, stream, noise(track.seconds, track.rate, channels), track.layout, track.rate)


def _encode(
    out: av.container.OutputContainer,
    stream: av.audio.stream.AudioStream,
    samples: NDArray[np.float32],
    layout: str,
    rate: int,
) -> None:
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
    out.mux(stream.encode(frame))
    out.mux(stream.encode(None))
