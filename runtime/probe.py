"""An independent look into a finished MP4: every frame and sample decoded, every promise measured."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError

from runtime.contract import Colour

DURATION_TOLERANCE = 0.1
"""Seconds by which sound and picture may differ."""

# ITU-T H.273: 2 is "unspecified"; ffmpeg shows a range that is not stated as 0.
_TAGS: dict[Colour, dict[str, int]] = {
    "bt709": {"primaries": 1, "transfer": 1, "matrix": 1, "range": 1},
    "bt601_untagged": {"primaries": 2, "transfer": 2, "matrix": 2, "range": 0},
}


class ProbeError(ValueError):
    """A file that is not a decodable MP4 with one video and one audio track."""


@dataclass(frozen=True)
class VideoFacts:
    """The picture track. frames are decoded ones; colour holds the ITU-T H.273 codes; variance is of 8-bit luma."""

    codec: str
    profile: str
    pixel_format: str
    width: int
    height: int
    frames: int
    fps: float
    constant_rate: bool
    seconds: float
    colour: dict[str, int]
    variance: float


@dataclass(frozen=True)
class AudioFacts:
    """The sound track. samples: decoded, of one channel. seconds: as declared. rms and mean: of samples in [-1, 1]."""

    codec: str
    profile: str
    sample_rate: int
    channels: int
    samples: int
    seconds: float
    bit_rate: int
    rms: float
    mean: float


@dataclass(frozen=True)
class MediaReport:
    """What an MP4 holds. boxes: its top-level boxes in file order. size_bytes: of the file."""

    size_bytes: int
    boxes: tuple[str, ...]
    video: VideoFacts
    audio: AudioFacts

    @property
    def moov_before_mdat(self) -> bool:
        """Whether a player can start before it has the whole file."""
        kept = [box for box in self.boxes if box in ("moov", "mdat")]
        return kept[:2] == ["moov", "mdat"] and kept.count("moov") == 1

    @property
    def fragments(self) -> int:
        """Movie fragments (`moof`); 0 for a file with one index."""
        return self.boxes.count("moof")

    def to_json(self) -> str:
        """The report as an indented JSON object."""
        return json.dumps(
            asdict(self) | {"moov_before_mdat": self.moov_before_mdat, "fragments": self.fragments}, indent=2
        )

    def problems(
        self, width: int, height: int, frames: int, sample_rate: int = 32_000, colour: Colour = "bt709"
    ) -> list[str]:
        """Every way in which the file differs from what a request was promised; empty when it is right."""
        video, audio = self.video, self.audio
        facts = [
            ("video codec", video.codec, "h264"),
            ("pixel format", video.pixel_format, "yuv420p"),
            ("size", (video.width, video.height), (width, height)),
            ("frames", video.frames, frames),
            ("fps", video.fps, 24.0),
            ("constant frame rate", video.constant_rate, True),
            ("colour", video.colour, _TAGS[colour]),
            ("audio codec", (audio.codec, audio.profile), ("aac", "LC")),
            ("sample rate", audio.sample_rate, sample_rate),
            ("channels", audio.channels, 2),
            ("moov before mdat", self.moov_before_mdat, True),
        ]
        wrong = [f"{name}: {found}, expected {expected}" for name, found, expected in facts if found != expected]
        return wrong + self._measured_problems(frames / 24)

    def _measured_problems(self, seconds: float) -> list[str]:
        lengths = [("video", self.video.seconds), ("audio", self.audio.seconds)]
        wrong = [
            f"{track} seconds: {found:.3f}, expected {seconds:.3f} within {DURATION_TOLERANCE}"
            for track, found in lengths
            if abs(found - seconds) > DURATION_TOLERANCE
        ]
        levels = [("pixel variance", self.video.variance), ("audio RMS", self.audio.rms)]
        return wrong + [f"{name}: {found}, expected above 0" for name, found in levels if not found > 0]


def inspect_mp4(source: str | Path | bytes) -> MediaReport:
    """Decode every frame and sample of an MP4 (a path or its bytes) and report what is in it. Raises ProbeError."""
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    boxes = tuple(kind for kind, _ in top_level_boxes(data))
    try:
        with av.open(io.BytesIO(data), "r") as container:
            video = _video_facts(container)
        with av.open(io.BytesIO(data), "r") as container:
            audio = _audio_facts(container)
    except FFmpegError as error:
        raise ProbeError(f"mp4: not decodable, {error}") from error
    return MediaReport(len(data), boxes, video, audio)


def top_level_boxes(data: bytes) -> Iterator[tuple[str, int]]:
    """Type and size in bytes of each top-level box (ISO 14496-12, 4.2); raises ProbeError on a broken chain."""
    offset = 0
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4], "big")
        if size == 1:
            size = int.from_bytes(data[offset + 8 : offset + 16], "big")
        elif size == 0:
            size = len(data) - offset
        if size < 8 or offset + size > len(data):
            raise ProbeError(f"mp4: box at byte {offset} has size {size}, the file ends at {len(data)}")
        yield data[offset + 4 : offset + 8].decode("latin-1"), size
        offset += size


def _video_facts(container: InputContainer) -> VideoFacts:
    if len(container.streams.video) != 1:
        raise ProbeError(f"mp4: {len(container.streams.video)} video tracks, expected one")
    stream = container.streams.video[0]
    context, base = stream.codec_context, stream.time_base
    times: list[Fraction] = []
    moments = np.zeros(3)
    for frame in container.decode(stream):
        times.append(Fraction(frame.pts or 0) * (frame.time_base or 0))
        luma = frame.to_ndarray(format="yuv420p")[: frame.height].astype(np.float64)
        moments += (luma.size, luma.sum(), np.square(luma).sum())
    rate = Fraction(stream.average_rate or 0)
    return VideoFacts(
        codec=context.codec.canonical_name,
        profile=str(context.profile),
        pixel_format=str(context.pix_fmt),
        width=context.width,
        height=context.height,
        frames=len(times),
        fps=float(rate),
        constant_rate=bool(rate) and times == [Fraction(index) / rate for index in range(len(times))],
        seconds=float((stream.duration or 0) * (base or 0)),
        colour={
            "primaries": int(context.color_primaries),
            "transfer": int(context.color_trc),
            "matrix": int(context.colorspace),
            "range": int(context.color_range),
        },
        variance=float(_variance(moments)),
    )


def _audio_facts(container: InputContainer) -> AudioFacts:
    if len(container.streams.audio) != 1:
        raise ProbeError(f"mp4: {len(container.streams.audio)} audio tracks, expected one")
    stream = container.streams.audio[0]
    context = stream.codec_context
    moments, samples = np.zeros(3), 0
    for frame in container.decode(stream):
        values = frame.to_ndarray().astype(np.float64)
        samples += frame.samples
        moments += (values.size, values.sum(), np.square(values).sum())
    count, total, squares = moments
    return AudioFacts(
        codec=context.codec.canonical_name,
        profile=str(context.profile),
        sample_rate=context.sample_rate,
        channels=context.layout.nb_channels,
        samples=samples,
        seconds=float((stream.duration or 0) * (stream.time_base or 0)),
        bit_rate=int(stream.bit_rate or context.bit_rate or 0),
        rms=math.sqrt(squares / count) if count else 0.0,
        mean=float(total / count) if count else 0.0,
    )


def _variance(moments: np.ndarray) -> float:
    count, total, squares = moments
    return float(squares / count - (total / count) ** 2) if count else 0.0
