"""Files for requests to the running server: what a vector's facts describe, and every limit of contract 1.6."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from runtime.contract import MEDIA_BYTES
from runtime.media.facts import Facts, ImageFacts, Kind, VideoFacts
from runtime.media.limits import LIMITS, MIB
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
    """A limit: `within` is at it and taken, `beyond` is one past it and refused at `where` for `rule`."""

    name: str
    within: Files
    beyond: Files
    where: str
    rule: str
    params: Mapping[str, Any] | None = None
    beyond_params: Mapping[str, Any] | None = None

    def request(self, beyond: bool) -> tuple[dict[str, Any], Files]:
        """The parameters and the files."""
        params = (self.beyond_params if beyond else None) or self.params or {}
        return {**REF, **params}, self.beyond if beyond else self.within


def limits() -> list[Limit]:
    """Every limit of images, videos and sounds, and of all together."""
    return [*_images(), *_videos(), *_sounds(), *_together()]


def _still(width: int, height: int) -> bytes:
    return saved(Image.new("RGB", (width, height), (200, 30, 30)), "PNG")


def _padded(data: bytes, size: int) -> bytes:
    """A file of exactly that many bytes; readers of JPEG, MP4 and WAV do not look behind their end."""
    return data + bytes(size - len(data))


def _boxed(data: bytes, size: int) -> bytes:
    """An MP4 of exactly that many bytes, filled up with a box that readers skip."""
    rest = size - len(data)
    return data + rest.to_bytes(4, "big") + b"free" + bytes(rest - 8)


def _images() -> list[Limit]:
    def sides(name: str, within: tuple[int, int], beyond: tuple[int, int], rule: str) -> Limit:
        return Limit(name, {"image": [_still(*within)]}, {"image": [_still(*beyond)]}, "IMAGES[0]", rule)

    jpeg, most = saved(picture(), "JPEG"), LIMITS["image"].bytes_maximum
    rule = f"at most {most} bytes"
    return [
        sides("smallest side", (256, 256), (255, 256), "from 256 to 5760 px"),
        sides("largest side", (5760, 2304), (5761, 2400), "from 256 to 5760 px"),
        sides("widest", (640, 256), (641, 256), "from 0.4 to 2.5"),
        sides("narrowest", (256, 640), (256, 641), "from 0.4 to 2.5"),
        Limit("image bytes", {"image": [_padded(jpeg, most)]}, {"image": [bytes(most + 1)]}, "IMAGES[0]", rule),
    ]


def _clip(seconds: float, fps: float = 24, track: float = 0) -> bytes:
    return video(even(seconds, fps), track=Track(track) if track else None)


def _videos() -> list[Limit]:
    def one(name: str, within: bytes, beyond: bytes, rule: str) -> Limit:
        return Limit(name, {"video": [within]}, {"video": [beyond]}, "VIDEOS[0]", rule)

    most = LIMITS["video"].bytes_maximum
    start = Limit(
        "start that leaves 2 s",
        {"video": [_clip(3)]},
        {"video": [_clip(3)]},
        "VIDEOS[0]",
        "leave 2 s of the video",
        {"start_time_seconds": 1},
        {"start_time_seconds": 1.01},
    )
    return [
        one("shortest video", _clip(2), _clip(1.9), "must last from 2 to 15 s"),
        one("longest video", _clip(15), _clip(15.1), "must last from 2 to 15 s"),
        one("slowest video", _clip(3, 23.976), _clip(3, 23), "from 23.976 to 60 frames a second"),
        one("fastest video", _clip(3, 60), _clip(3, 61), "from 23.976 to 60 frames a second"),
        one("video side", _clip(2), video(even(2, 24), size=(254, 256)), "from 256 to 5760 px"),
        one("video bytes", _boxed(_clip(2), most), bytes(most + 1), f"at most {most} bytes"),
        one("soundtrack", _clip(15, track=15), _clip(2, track=16), "must last"),
        start,
    ]


def _sounds() -> list[Limit]:
    still = [_still(256, 256)]

    def one(name: str, within: bytes, beyond: bytes, rule: str) -> Limit:
        files: list[Files] = [{"image": still, "audio": [data]} for data in (within, beyond)]
        return Limit(name, files[0], files[1], "AUDIOS[0]", rule)

    def pcm(seconds: float, rate: int = 8000, channels: int = 1) -> bytes:
        return wav(noise(seconds, rate, channels), rate)

    most = LIMITS["audio"].bytes_maximum
    return [
        one("shortest sound", pcm(2), pcm(1.99), "must last from 2 to 15 s"),
        one("longest sound", pcm(15), pcm(15.01), "must last from 2 to 15 s"),
        one("lowest rate", pcm(2, 8000), pcm(2, 7999), "from 8000 to 192000"),
        one("most channels", pcm(2, channels=2), sound(noise(2, 8000, 6), 8000, "pcm_s16le", "wav"), "mono or stereo"),
        one("sound bytes", _padded(pcm(2), most), bytes(most + 1), f"at most {most} bytes"),
    ]


def _together() -> list[Limit]:
    seven, eight = _clip(7.5), _clip(7.6)
    voice, longer = (wav(noise(seconds, 8000, 1), 8000) for seconds in (7.5, 7.6))
    spoken = _clip(10, track=10)
    still = _still(256, 256)
    jpeg, part = saved(picture(), "JPEG"), 22 * MIB
    rest = MEDIA_BYTES - 2 * part
    whole = [_padded(jpeg, part), _padded(jpeg, part)]
    return [
        Limit("videos together", {"video": [seven, seven]}, {"video": [seven, eight]}, "VIDEOS[1]", "15 s in all"),
        Limit(
            "sounds together",
            {"image": [still], "audio": [voice, voice]},
            {"image": [still], "audio": [voice, longer]},
            "AUDIOS[1]",
            "15 s in all",
        ),
        # Soundtracks have a budget of their own, beside that of sounds.
        Limit(
            "soundtrack beside a sound",
            {"video": [spoken], "audio": [wav(noise(10, 8000, 1), 8000)]},
            {"video": [_clip(5, track=7), _clip(5, track=9)]},
            "VIDEOS[1]",
            "15 s in all",
        ),
        Limit(
            "bytes together",
            {"image": [*whole, _padded(jpeg, rest)]},
            {"image": [*whole, _padded(jpeg, rest + 1)]},
            "IMAGES[2]",
            f"at most {MEDIA_BYTES} bytes together",
        ),
    ]
