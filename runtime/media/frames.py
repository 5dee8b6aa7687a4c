"""Frames of a video on the 24 frames a second grid, upright and resized."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from runtime.media.container import opened, packets, pixels_limit
from runtime.media.facts import VideoFacts
from runtime.media.formats import check_format
from runtime.media.movie import read_movie
from runtime.media.pixels import resize_image
from runtime.media.refusals import refusing
from runtime.media.timeline import held
from runtime.media.track import Track, read_track, upright, video_stream
from runtime.refusal import RequestError


def decode_video(
    data: bytes, facts: VideoFacts, where: str, start_time_seconds: float, count: int, size: tuple[int, int]
) -> Iterator[NDArray[np.uint8]]:
    """The first `count` frames at 24 a second: uint8 [h, w, 3] RGB, LANCZOS to size = (width, height).

    `facts` is what `probe` found. A source frame is converted once, however long it is held, and frames are made as
    they are asked for. Raises RequestError: where the stream holds other frames than its table, `where` is named.
    """
    if not 1 <= count <= facts.frames:
        raise RequestError(where, f"{count} frames", f"must be from 1 to the video's {facts.frames} frames")
    with refusing(where, "a video file", "must be decodable"):
        name = check_format(data, "video", where)
        movie = read_movie(data)
    with refusing(where, f"{name} file", "must be decodable"), opened(data, "mov") as container:
        stream = video_stream(container)
        track = read_track(container, stream, movie, len(data))
        shown = held(track.times(Fraction(start_time_seconds)), count)
    with opened(data, "mov") as container:
        stream = video_stream(container)
        frames = _decoded(container, stream, track, len(data))
        yield from _held(frames, shown, track, size, where, name)


def _held(
    frames: Iterator[VideoFrame], shown: list[int], track: Track, size: tuple[int, int], where: str, name: str
) -> Iterator[NDArray[np.uint8]]:
    index, pixels = -1, None
    for wanted in shown:
        if wanted != index or pixels is None:
            with refusing(where, f"{name} file", "must be decodable"):
                while index < wanted:
                    frame, index = next(frames), index + 1
                # Pillow's filter on the upright frame, as the reference pipeline resizes decoded frames.
                pixels = resize_image(upright(_rgb(frame), track.turn), size)
        yield pixels


def _rgb(frame: VideoFrame) -> NDArray[np.uint8]:
    return frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)


def _decoded(container: InputContainer, stream: VideoStream, track: Track, bytes_maximum: int) -> Iterator[VideoFrame]:
    """The frames that the table promises, one for each of its times. Raises ValueError at the first that differs."""
    stream.codec_context.options = pixels_limit(track.width, track.height)
    stream.codec_context.thread_count = 1
    promised = iter(track.stamps)
    for packet in packets(container, stream, bytes_maximum):
        for frame in stream.decode(packet):
            if frame.pts != next(promised, None) or frame.is_corrupt:
                raise ValueError("its stream does not hold the frames that its table promises: damaged")
            if (frame.width, frame.height) != (track.width, track.height):
                found, promise = f"{frame.width}x{frame.height}", f"{track.width}x{track.height}"
                raise ValueError(f"a frame has {found} px, its header promises {promise} px")
            yield frame
    raise ValueError("its stream ends before the frames that its table promises: damaged")
