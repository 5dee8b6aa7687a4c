"""What reference media may be, as one table: checks, error texts, docs and tests read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.media.facts import ImageFacts, Kind, SoundFacts, VideoFacts
from runtime.refusal import RequestError

MIB = 1 << 20

SIDES = (256, 5760)
"""Pixels of each side of a picture as shown, and of a video's coded frames."""
RATIOS = (0.4, 2.5)
"""Width / height of a picture as shown."""
SECONDS = (2.0, 15.0)
"""Of each video from its start time on and in all, and of each sound; the maximum is also each kind's sum."""
OVERSHOOT = 0.01
"""Seconds by which a video may exceed the maximum; they are cut off."""
SOUNDTRACK_SECONDS = (1.975, 15.0)
"""A soundtrack makes at least 80 latents of 25 ms, the last of which may be begun only."""
SOUNDTRACK_OVERSHOOT = 0.05
"""Seconds of a soundtrack that are cut off: the longest frame of AAC or MP3, as sound is coded in whole frames."""
RATES = (23.976, 60.0)
"""Mean frames a second."""
RATE_DRIFT = 0.001
"""Relative; cameras' clocks are not exact."""
SAMPLE_RATES = (8_000, 192_000)
CHANNELS = (1, 2)
COUNTS: dict[Kind, int] = {"image": 9, "video": 3, "audio": 3}
COUNT_IN_ALL = 12


@dataclass(frozen=True)
class Limits:
    """The limits of one kind of file. names: what the file is called in texts; codecs: FFmpeg's names."""

    kind: Kind
    formats: tuple[str, ...]
    bytes_maximum: int
    codecs: tuple[str, ...] = ()
    sound_codecs: tuple[str, ...] = ()

    @property
    def formats_text(self) -> str:
        """The legal formats in words."""
        return f"{', '.join(self.formats[:-1])} or {self.formats[-1]}"

    @property
    def size_text(self) -> str:
        """The largest file in words."""
        return f"{self.bytes_maximum // MIB} MiB"


LIMITS: dict[Kind, Limits] = {
    "image": Limits("image", ("JPEG", "PNG", "WEBP", "HEIC"), 30 * MIB),
    "video": Limits("video", ("MP4", "MOV"), 50 * MIB, ("h264", "hevc"), ("aac", "mp3", "mp3float")),
    "audio": Limits("audio", ("WAV", "MP3"), 15 * MIB, (), ("aac", "mp3", "mp3float")),
}
"""By kind. Sounds may also be any pcm_* codec."""


def rows() -> list[tuple[str, str, str, str]]:
    """The table for people: a property, then what it may be for images, videos and sounds."""
    sides, ratios = f"{SIDES[0]} to {SIDES[1]} px", f"{RATIOS[0]:g} to {RATIOS[1]:g}"
    rates = f"{SAMPLE_RATES[0]} to {SAMPLE_RATES[1]} Hz"
    seconds = f"{SECONDS[0]:g} to {SECONDS[1]:g} s each, at most {SECONDS[1]:g} s in all"
    image, video, audio = LIMITS.values()
    return [
        ("Format", image.formats_text, video.formats_text, audio.formats_text),
        ("Codec", "any of the format", "H.264 or H.265; sound in AAC or MP3, or none", "MP3, AAC or any PCM"),
        ("Size at most", image.size_text, video.size_text, audio.size_text),
        ("Each side", sides, sides, "-"),
        ("Width / height", ratios, ratios, "-"),
        ("Frames a second", "-", f"{RATES[0]:g} to {RATES[1]:g} (mean)", "-"),
        ("Time", "-", f"{seconds}; soundtracks {SECONDS[1]:g} s in all of their own", seconds),
        ("Channels", "-", "1 or 2", "1 or 2"),
        ("Sample rate", "-", rates, rates),
        ("Number at most", str(COUNTS["image"]), str(COUNTS["video"]), str(COUNTS["audio"])),
    ]


_ROUNDING = 1e-6
"""Seconds that sums and differences of decimal fractions may be off by: less than any sample lasts."""


def check_bytes(size: int, kind: Kind, where: str) -> None:
    """Refuses an empty file and one above its kind's size. Raises RequestError."""
    maximum = LIMITS[kind].bytes_maximum
    if not size:
        raise RequestError(where, "an empty file", f"must be {LIMITS[kind].formats_text}")
    if size > maximum:
        rule = f"{_article(kind)} must have at most {LIMITS[kind].size_text} ({maximum} bytes)"
        raise RequestError(where, f"{size} bytes", rule)


def check_sides(width: int, height: int, kind: Kind, where: str) -> None:
    """Refuses a picture whose sides or ratio are outside the limits. Raises RequestError."""
    low, high = SIDES
    size = f"{width}x{height} px"
    if min(width, height) < low or max(width, height) > high:
        rule = f"each side of {_article(kind)} must be from {low} to {high} px"
        raise RequestError(where, size, rule, _size_text(_clamp(width, SIDES), _clamp(height, SIDES)))
    if not RATIOS[0] * height <= width <= RATIOS[1] * height:
        rule = f"width / height of {_article(kind)} must be from {RATIOS[0]:g} to {RATIOS[1]:g}"
        raise RequestError(where, size, rule, _nearest_ratio(width, height))


def check_rate(frames_per_second: float, where: str) -> None:
    """Refuses a mean frame rate outside the limits. Raises RequestError."""
    low, high = RATES[0] * (1 - RATE_DRIFT), RATES[1] * (1 + RATE_DRIFT)
    if not low <= frames_per_second <= high:
        rule = f"a video must have from {RATES[0]:g} to {RATES[1]:g} frames a second"
        raise RequestError(where, f"{frames_per_second:.6g} frames a second", rule, _clamp(frames_per_second, RATES))


def check_video_seconds(seconds: float, where: str) -> None:
    """Refuses a whole video that is too short or too long. Raises RequestError."""
    if not SECONDS[0] <= seconds <= SECONDS[1] + OVERSHOOT:
        raise _wrong_seconds(seconds, "a video", SECONDS, where)


def check_start(start: float, seconds: float, where: str) -> None:
    """Refuses a start time that leaves less than the minimum of a video that lasts `seconds`. Raises RequestError."""
    usable = min(seconds, SECONDS[1])
    # Both may be the nearest binary fractions of decimals: 4.1 - 2.1 is less than 2.
    left = usable - SECONDS[0] + _ROUNDING
    latest = math.floor(left * 1000) / 1000
    if not 0 <= start <= left:
        rule = f"start_time_seconds must be at least 0 and leave {SECONDS[0]:g} s of the video's {usable:.3f} s"
        raise RequestError(where, f"start_time_seconds {start}", rule, 0.0 if not start > 0 else latest)


def check_sound(sample_rate: int, channels: int, where: str) -> None:
    """Refuses a sample rate or a number of channels outside the limits. Raises RequestError."""
    if not SAMPLE_RATES[0] <= sample_rate <= SAMPLE_RATES[1]:
        rule = f"a sound must have from {SAMPLE_RATES[0]} to {SAMPLE_RATES[1]} samples a second"
        raise RequestError(where, f"{sample_rate} Hz", rule, _clamp(sample_rate, SAMPLE_RATES))
    if not CHANNELS[0] <= channels <= CHANNELS[1]:
        raise RequestError(where, f"{channels} channels", "a sound must be mono or stereo", "2 channels")


def check_sound_seconds(seconds: float, where: str) -> None:
    """Refuses a sound that is too short or too long. Raises RequestError."""
    if not SECONDS[0] <= seconds <= SECONDS[1]:
        raise _wrong_seconds(seconds, "a sound", SECONDS, where)


def check_soundtrack_seconds(seconds: float, where: str) -> None:
    """Refuses a soundtrack, from the start time on, that is too short or too long. Raises RequestError."""
    if not SOUNDTRACK_SECONDS[0] < seconds <= SOUNDTRACK_SECONDS[1] + SOUNDTRACK_OVERSHOOT:
        raise _wrong_seconds(seconds, "the soundtrack of a video", SOUNDTRACK_SECONDS, where)


def check_together(facts: Sequence[ImageFacts | VideoFacts | SoundFacts], wheres: Sequence[str]) -> None:
    """Refuses more files or more seconds than a request may have. `wheres` names each file. Raises RequestError."""
    _check_counts([one.kind for one in facts], wheres)
    named = list(zip(facts, wheres, strict=True))
    videos = [(one.seconds, where) for one, where in named if isinstance(one, VideoFacts)]
    tracks = [
        (one.sound.seconds, where) for one, where in named if isinstance(one, VideoFacts) and one.sound is not None
    ]
    sounds = [(one.seconds, where) for one, where in named if isinstance(one, SoundFacts)]
    _check_budget(videos, OVERSHOOT, "videos")
    _check_budget(tracks, SOUNDTRACK_OVERSHOOT, "soundtracks of videos")
    _check_budget(sounds, 0.0, "sounds")


def _check_counts(kinds: Sequence[Kind], wheres: Sequence[str]) -> None:
    for kind, maximum in COUNTS.items():
        positions = [index for index, one in enumerate(kinds) if one == kind]
        if len(positions) > maximum:
            rule = f"a request may have at most {maximum} {kind} references"
            raise RequestError(wheres[positions[maximum]], f"{len(positions)} {kind} references", rule, maximum)
    if len(kinds) > COUNT_IN_ALL:
        rule = f"a request may have at most {COUNT_IN_ALL} references"
        raise RequestError(wheres[COUNT_IN_ALL], f"{len(kinds)} references", rule, COUNT_IN_ALL)


def _check_budget(seconds: Iterable[tuple[float, str]], overshoot: float, what: str) -> None:
    total = 0.0
    for one, where in seconds:
        left = SECONDS[1] - total
        total += one
        if total > SECONDS[1] + overshoot + _ROUNDING:
            rule = f"the {what} of a request may last at most {SECONDS[1]:g} s in all"
            nearest = f"at most {left:.3f} s here" if left >= SECONDS[0] else "leave this one out"
            raise RequestError(where, f"{total:.3f} s in all", rule, nearest)


def _wrong_seconds(seconds: float, what: str, legal: tuple[float, float], where: str) -> RequestError:
    rule = f"{what} must last from {legal[0]:g} to {legal[1]:g} s"
    return RequestError(where, f"{seconds:.6g} s", rule, f"{_clamp(seconds, legal):g} s")


def _nearest_ratio(width: int, height: int) -> str:
    if width > RATIOS[1] * height:
        return _size_text(math.floor(RATIOS[1] * height), height)
    return _size_text(width, math.floor(width / RATIOS[0]))


def _size_text(width: float, height: float) -> str:
    return f"{int(width)}x{int(height)} px"


def _clamp(value: float, legal: tuple[float, float]) -> float:
    return min(max(value, legal[0]), legal[1])


def _article(kind: Kind) -> str:
    return {"image": "an image", "video": "a video", "audio": "a sound"}[kind]
