"""Samples of sounds and of soundtracks: counted by `probe`, decoded and resampled for the model by `decode_sound`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from runtime.media import riff
from runtime.media.container import Demuxer, opened, packets
from runtime.media.facts import SoundFacts
from runtime.media.formats import check_format, format_of
from runtime.media.limits import (
    LIMITS,
    SECONDS,
    check_sound,
    check_sound_seconds,
    check_soundtrack_seconds,
)
from runtime.media.movie import read_movie
from runtime.media.refusals import refusing
from runtime.media.track import read_track, soundtrack_stream, video_stream

if TYPE_CHECKING:
    import torch

MODEL_RATE = 32_000
"""Samples a second that the audio encoder takes."""

_ID3_HEADER = 10
_ID3_TAGS_MAXIMUM = 8


@dataclass(frozen=True)
class _Sound:
    """A track of sound and when it is wanted from, in its container's seconds; None: from its first sample."""

    container: InputContainer
    stream: AudioStream
    begin: Fraction | None
    bytes_maximum: int

    @property
    def rate(self) -> int:
        return self.stream.codec_context.sample_rate

    @property
    def channels(self) -> int:
        return self.stream.codec_context.layout.nb_channels

    def chunks(self, samples: int) -> Iterator[NDArray[np.float32]]:
        """At most that many samples from `begin` on, [channels, n] a time; silence where the track begins later."""
        wait = None
        for chunk, time in self._decoded():
            if wait is None:
                wait = 0 if self.begin is None else round((time - self.begin) * self.rate)
                if wait > 0:
                    silence = np.zeros((self.channels, min(wait, samples)), np.float32)
                    wait, samples = 0, samples - silence.shape[1]
                    yield silence
            kept = chunk[:, -wait if wait < 0 else 0 :][:, :samples]
            wait = min(0, wait + chunk.shape[1])
            samples -= kept.shape[1]
            yield kept
            if not samples:
                return

    def count(self, samples: int) -> int:
        """How many samples there are from `begin` on, counted up to `samples`; decoded, but not kept."""
        return sum(chunk.shape[1] for chunk in self.chunks(samples))

    def _decoded(self) -> Iterator[tuple[NDArray[np.float32], Fraction]]:
        """All samples as planar float32, each chunk with its frame's time. Rate and layout stay the file's own."""
        resampler = AudioResampler(format="fltp", layout=self.stream.layout, rate=self.rate)
        for packet in packets(self.container, self.stream, self.bytes_maximum):
            for frame in self.stream.decode(packet):
                time = Fraction(frame.pts or 0) * Fraction(frame.time_base or 0)
                yield from (
                    (one.to_ndarray().astype(np.float32, copy=False), time) for one in resampler.resample(frame)
                )


def probe_sound(data: bytes, where: str) -> SoundFacts:
    """What a file of sound holds. Its samples are counted by decoding them. Raises RequestError."""
    name = check_format(data, "audio", where)
    with refusing(where, f"{name} file", "must be a whole sound"), _opened_sound(data, name) as container:
        sound = _Sound(container, _sound_stream(container), None, len(data))
        check_sound(sound.rate, sound.channels, where)
        if container.duration and container.duration > (SECONDS[1] + 1) * 1_000_000:
            check_sound_seconds(container.duration / 1_000_000, where)
        samples = sound.count(int(SECONDS[1] * sound.rate) + sound.rate)
        check_sound_seconds(samples / sound.rate, where)
        return SoundFacts(sample_rate=sound.rate, channels=sound.channels, samples=samples)


def probe_soundtrack(container: InputContainer, begin: Fraction, bytes_maximum: int, where: str) -> SoundFacts | None:
    """The soundtrack of an open video from `begin` on, in the container's seconds; None where it has no sound there.

    Raises RequestError for its limits and ValueError for another codec.
    """
    stream = soundtrack_stream(container)
    if stream is None:
        return None
    sound = _Sound(container, stream, begin, bytes_maximum)
    check_sound(sound.rate, sound.channels, where)
    samples = sound.count(int((SECONDS[1] + 1) * sound.rate))
    if not samples:
        return None
    check_soundtrack_seconds(samples / sound.rate, where)
    kept = min(samples, int(SECONDS[1] * sound.rate))
    return SoundFacts(sample_rate=sound.rate, channels=sound.channels, samples=kept)


def decode_sound(data: bytes, where: str, start_time_seconds: float, seconds: float) -> torch.Tensor:
    """A sound, or the soundtrack of a video from its start time on: float32 [2, n] at 32 kHz.

    Cut at int(seconds * rate) samples of its own rate, resampled as torchaudio's Resample does by default; mono is
    given to both channels. start_time_seconds is of videos. Raises RequestError.
    """
    import torch

    from runtime.media.resample import resample

    name = format_of(data)
    with refusing(where, f"{name} file", "must be decodable"):
        if name in LIMITS["video"].formats:
            check_format(data, "video", where)
            waveform, rate = _soundtrack(data, start_time_seconds, seconds)
        else:
            waveform, rate = _sound(data, check_format(data, "audio", where), seconds)
        return resample(torch.from_numpy(waveform).expand(2, -1), rate, MODEL_RATE).contiguous()


def _sound(data: bytes, name: str, seconds: float) -> tuple[NDArray[np.float32], int]:
    with _opened_sound(data, name) as container:
        return _collected(_Sound(container, _sound_stream(container), None, len(data)), seconds)


def _soundtrack(data: bytes, start: float, seconds: float) -> tuple[NDArray[np.float32], int]:
    movie = read_movie(data)
    with opened(data, "mov") as container:
        zero = read_track(container, video_stream(container), movie, len(data)).zero
    with opened(data, "mov") as container:
        stream = soundtrack_stream(container)
        if stream is None:
            raise ValueError("it has no soundtrack")
        return _collected(_Sound(container, stream, zero + Fraction(start), len(data)), seconds)


def _collected(sound: _Sound, seconds: float) -> tuple[NDArray[np.float32], int]:
    samples = int(min(seconds, SECONDS[1]) * sound.rate)
    return np.concatenate(list(sound.chunks(samples)), axis=1), sound.rate


def _opened_sound(data: bytes, name: str) -> AbstractContextManager[InputContainer]:
    demuxer: Demuxer = "wav" if name == "WAV" else "mp3"
    return opened(riff.plain_wav(data) if name == "WAV" else _without_tags(data), demuxer)


def _without_tags(data: bytes) -> bytes:
    """An MP3 file without its ID3v2 tags, whose compressed frames a library would unpack to any size."""
    at = 0
    for _ in range(_ID3_TAGS_MAXIMUM):
        if data[at : at + 3] != b"ID3":
            return data[at:]
        header = data[at : at + _ID3_HEADER]
        # Four bytes of seven bits; a flag says that the header is repeated at the end.
        size = sum((byte & 0x7F) << shift for byte, shift in zip(header[6:10], (21, 14, 7, 0), strict=False))
        at += _ID3_HEADER + size + (_ID3_HEADER if len(header) > 5 and header[5] & 0x10 else 0)
    raise ValueError(f"it has more than {_ID3_TAGS_MAXIMUM} tags")


def _sound_stream(container: InputContainer) -> AudioStream:
    if not container.streams.audio:
        raise ValueError("it has no track of sound")
    stream = container.streams.audio[0]
    name = stream.codec_context.name
    if name not in LIMITS["audio"].sound_codecs and not name.startswith("pcm_"):
        raise ValueError(f"its sound is {name}, not MP3, AAC or PCM")
    return stream
