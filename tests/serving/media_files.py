"""Files for requests to the running server: what a vector's facts describe, and every limit of contract 1.6."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from runtime.contract import MEDIA_BYTES
from runtime.media.facts import Facts, ImageFacts, Kind, VideoFacts
from runtime.media.limits import LIMITS, MIB
from runtime.reference_kinds import INPUTS
from tests.media.clips import Track, even, noise, picture, saved, sound, video, wav

Files = Mapping[Kind, Sequence[bytes]]

REF = {
    "task": "ref2va",
    "width": 256,
    "height": 256,
    "duration": 4,
    "num_inference_steps": 1,
    "reference_short_edge": 256,
}


@functools.cache
def file_of(facts: Facts) -> bytes:
    """A file that has about these facts."""
    if isinstance(facts, ImageFacts):
        return saved(picture(facts.width, facts.height), "PNG")
    if isinstance(facts, VideoFacts):
        track = None if facts.sound is None else Track(facts.sound.seconds)
        return video(even(facts.seconds, 24), size=(facts.width, facts.height), track=track)
    return wav(noise(facts.seconds, facts.sample_rate, facts.channels), facts.sample_rate)


def files_of(media: Sequence[Facts]) -> Files:
    """The files of a request."""
    found: dict[Kind, list[bytes]] = {}
    for one in media:
        found.setdefault(one.kind, []).append(file_of(one))
    return found


@dataclass(frozen=True)
class Limit:
    """A limit: `within` makes files at it, which are taken; `beyond` ones past it, refused at `where` for `rule`."""

    name: str
    within: Callable[[], Files]
    beyond: Callable[[], Files]
    where: str
    rule: str
    params: Mapping[str, Any] = field(default_factory=dict)
    beyond_params: Mapping[str, Any] = field(default_factory=dict)


def _still(width: int, height: int) -> bytes:
    return saved(Image.new("RGB", (width, height), (200, 30, 30)), "PNG")


def _jpeg(size: int) -> bytes:
    """An image of exactly that many bytes: readers of JPEG do not look behind its end."""
    return _padded(saved(picture(), "JPEG"), size)


def _padded(data: bytes, size: int) -> bytes:
    return data + bytes(size - len(data))


def _boxed(data: bytes, size: int) -> bytes:
    """An MP4 of exactly that many bytes, filled up with a box that readers skip."""
    rest = size - len(data)
    return data + rest.to_bytes(4, "big") + b"free" + bytes(rest - 8)


@functools.cache
def _clip(seconds: float, fps: float = 24, track: float = 0) -> bytes:
    return video(even(seconds, fps), track=Track(track) if track else None)


def _pcm(seconds: float, rate: int = 8000, channels: int = 1) -> bytes:
    return wav(noise(seconds, rate, channels), rate)


def _one(name: str, kind: Kind, within: Callable[[], bytes], beyond: Callable[[], bytes], rule: str) -> Limit:
    """A limit of one file; a sound has an image beside it."""

    def files(make: Callable[[], bytes]) -> Files:
        return {**({"image": [_still(256, 256)]} if kind == "audio" else {}), kind: [make()]}

    return Limit(name, lambda: files(within), lambda: files(beyond), f"{INPUTS[kind]}[0]", rule)


def _large(kind: Kind, within: Callable[[int], bytes]) -> Limit:
    most = LIMITS[kind].bytes_maximum
    rule = f"must have at most {most // MIB} MiB ({most} bytes)"
    return _one(f"{kind} bytes", kind, lambda: within(most), lambda: bytes(most + 1), rule)


_SIDES, _RATIOS = "from 256 to 5760 px", "from 0.4 to 2.5"
_SECONDS, _TOGETHER = "must last from 2 to 15 s", "15 s in all"
_RATES = "from 23.976 to 60 frames a second"
_PART = 22 * MIB
_REST = MEDIA_BYTES - 2 * _PART

MEDIA_LIMITS: tuple[Limit, ...] = (
    _one("smallest side", "image", lambda: _still(256, 256), lambda: _still(255, 256), _SIDES),
    _one("largest side", "image", lambda: _still(5760, 2304), lambda: _still(5761, 2400), _SIDES),
    _one("widest", "image", lambda: _still(640, 256), lambda: _still(641, 256), _RATIOS),
    _one("narrowest", "image", lambda: _still(256, 640), lambda: _still(256, 641), _RATIOS),
    _large("image", _jpeg),
    _one("shortest video", "video", lambda: _clip(2), lambda: _clip(1.9), _SECONDS),
    _one("longest video", "video", lambda: _clip(15), lambda: _clip(15.1), _SECONDS),
    _one("slowest video", "video", lambda: _clip(3, 23.976), lambda: _clip(3, 23), _RATES),
    _one("fastest video", "video", lambda: _clip(3, 60), lambda: _clip(3, 61), _RATES),
    _one("video side", "video", lambda: _clip(2), lambda: video(even(2, 24), size=(254, 256)), _SIDES),
    _large("video", lambda most: _boxed(_clip(2), most)),
    _one("soundtrack", "video", lambda: _clip(15, track=15), lambda: _clip(15, track=16), "must last"),
    Limit(
        "start that leaves 2 s",
        lambda: {"video": [_clip(3)]},
        lambda: {"video": [_clip(3)]},
        "VIDEOS[0]",
        "leave 2 s of the video",
        {"start_time_seconds": 1},
        {"start_time_seconds": 1.01},
    ),
    _one("shortest sound", "audio", lambda: _pcm(2), lambda: _pcm(1.99), _SECONDS),
    _one("longest sound", "audio", lambda: _pcm(15), lambda: _pcm(15.01), _SECONDS),
    _one("lowest rate", "audio", lambda: _pcm(2, 8000), lambda: _pcm(2.1, 7999), "from 8000 to 192000"),
    _one(
        "most channels",
        "audio",
        lambda: _pcm(2, channels=2),
        lambda: sound(noise(2.1, 8000, 6), 8000, "pcm_s16le", "wav"),
        "mono or stereo",
    ),
    _large("audio", lambda most: _padded(_pcm(2), most)),
    Limit(
        "videos together",
        lambda: {"video": [_clip(7.5), _clip(7.5)]},
        lambda: {"video": [_clip(7.5), _clip(7.6)]},
        "VIDEOS[1]",
        _TOGETHER,
    ),
    Limit(
        "sounds together",
        lambda: {"image": [_still(256, 256)], "audio": [_pcm(7.5), _pcm(7.5)]},
        lambda: {"image": [_still(256, 256)], "audio": [_pcm(7.5), _pcm(7.6)]},
        "AUDIOS[1]",
        _TOGETHER,
    ),
    # Soundtracks have a budget of their own, beside that of sounds.
    Limit(
        "soundtracks beside sounds",
        lambda: {"video": [_clip(10, track=10)], "audio": [_pcm(10)]},
        lambda: {"video": [_clip(7, track=7), _clip(8, track=9)], "audio": [_pcm(2)]},
        "VIDEOS[1]",
        _TOGETHER,
    ),
    Limit(
        "bytes together",
        lambda: {"image": [_jpeg(_PART), _jpeg(_PART), _jpeg(_REST)]},
        lambda: {"image": [_jpeg(_PART), _jpeg(_PART), _jpeg(_REST + 1)]},
        "references",
        f"at most {MEDIA_BYTES} bytes together",
    ),
)
"""Every limit of images, videos and sounds, and of all together."""
