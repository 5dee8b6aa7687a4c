"""What a reference file holds, and whether it may be used: headers and packet tables, no picture decoded."""

from __future__ import annotations

from fractions import Fraction

from runtime.media.container import opened
from runtime.media.facts import ImageFacts, Kind, SoundFacts, VideoFacts
from runtime.media.formats import check_format
from runtime.media.limits import (
    SECONDS,
    SIDES,
    SOUNDTRACK_OVERSHOOT,
    check_rate,
    check_sides,
    check_start,
    check_video_seconds,
)
from runtime.media.movie import read_movie
from runtime.media.refusals import refusing
from runtime.media.sound import probe_sound, probe_soundtrack
from runtime.media.stills import read_still
from runtime.media.timeline import slot
from runtime.media.track import Track, read_track, video_stream
from runtime.refusal import RequestError


def probe(data: bytes, kind: Kind, where: str, start_time_seconds: float = 0.0) -> ImageFacts | VideoFacts | SoundFacts:
    """The facts of a whole file of one kind, checked against every limit of `limits`. `where` names it in errors.

    start_time_seconds: of videos; frames and soundtrack count from there. Raises RequestError.
    """
    if kind != "video" and start_time_seconds:
        rule = "only videos have a start_time_seconds"
        raise RequestError(where, f"start_time_seconds {start_time_seconds}", rule, 0.0)
    if kind == "image":
        return _probe_image(data, where)
    if kind == "audio":
        return probe_sound(data, where)
    return _probe_video(data, where, start_time_seconds)


def _probe_image(data: bytes, where: str) -> ImageFacts:
    name = check_format(data, "image", where)
    with refusing(where, f"{name} file", "must be a whole, still image"):
        width, height = read_still(data, name).shown
    check_sides(width, height, "image", where)
    return ImageFacts(width=width, height=height)


def _probe_video(data: bytes, where: str, start: float) -> VideoFacts:
    name = check_format(data, "video", where)
    with refusing(where, f"{name} file", "must be a whole video"):
        movie = read_movie(data)
        if movie.seconds is not None and movie.seconds > SECONDS[1] + SOUNDTRACK_OVERSHOOT:
            check_video_seconds(movie.seconds, where)
        with opened(data, "mov") as container:
            track = read_track(container, video_stream(container), movie, len(data))
        _check_track(track, start, where)
        begin = Fraction(start)
        with opened(data, "mov") as container:
            sound = probe_soundtrack(container, track.zero + begin, len(data), where)
    seconds = min(track.seconds, Fraction(SECONDS[1])) - begin
    width, height = track.shown
    return VideoFacts(width=width, height=height, frames=slot(seconds), seconds=float(seconds), sound=sound)


def _check_track(track: Track, start: float, where: str) -> None:
    if max(track.width, track.height) > SIDES[1]:
        check_sides(track.width, track.height, "video", where)
    check_sides(*track.shown, "video", where)
    check_video_seconds(float(track.seconds), where)
    check_rate(track.rate, where)
    check_start(start, float(track.seconds), where)
