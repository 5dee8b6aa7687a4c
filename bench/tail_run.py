"""One run of the tail in a process of its own, without torch: `python -m bench.tail_run SIDE CONTAINER` prints JSON.

The source stands for a GPU: planes in host memory, a chunk 60 ms after it was asked for. Its pictures are four octaves
of smooth noise that move by 3 x 2 pixels a frame, with fresh grain of 1.5 levels: H.264 predicts them as it does film.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.requests import default_media
from runtime.events import Cancellation
from runtime.mux import MediaOptions, Mp4Writer
from runtime.tail import Chunk, encode_behind

WIDTH, HEIGHT, FRAMES = 1344, 768, 243
CHUNK_FRAMES = 17
CHUNK_SECONDS = 0.06
RATE = 32_000

Planes = NDArray[np.uint8]
Source = Callable[[], Generator[Chunk, None, None]]


@dataclass
class Run:
    """What one side took: seconds until the source was drained, in the encoder, and in all; and what it made."""

    wall: float = 0.0
    decode: float = 0.0
    encode: float = 0.0
    first_piece: float = 0.0
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def as_json(self) -> dict[str, Any]:
        """The figures, and the digest of the file."""
        times = {f"{name}_s": round(getattr(self, name), 4) for name in ("wall", "decode", "encode", "first_piece")}
        return {**times, "mp4_bytes": self.size, "sha256": self.digest.hexdigest()}


def serial(source: Source, waveform: NDArray[np.float32], size: tuple[int, int], options: MediaOptions) -> Run:
    """One thread that decodes a chunk, encodes it, and so on: the sum of both."""
    run, started = Run(), time.perf_counter()
    with Mp4Writer(*size, RATE, options, partial(_count, run, started)) as writer:
        writer.write_audio(waveform)
        for planes in _timed(run, source()):
            before = time.perf_counter()
            writer.write_frames(planes)
            run.encode += time.perf_counter() - before
        before = time.perf_counter()
        writer.finish()
        run.encode += time.perf_counter() - before
    run.wall = time.perf_counter() - started
    return run


def overlapped(source: Source, waveform: NDArray[np.float32], size: tuple[int, int], options: MediaOptions) -> Run:
    """The tail of the product."""
    run, started = Run(), time.perf_counter()
    writer = Mp4Writer(*size, RATE, options, partial(_count, run, started))
    encode_behind(source(), waveform, writer, Cancellation())
    run.wall = time.perf_counter() - started
    return run


SIDES = {"serial": serial, "overlapped": overlapped}


def _timed(run: Run, chunks: Iterator[Chunk]) -> Iterator[Planes]:
    before = time.perf_counter()
    for chunk in chunks:
        planes = chunk()
        run.decode += time.perf_counter() - before
        yield planes
        before = time.perf_counter()


def _count(run: Run, started: float, piece: bytes) -> None:
    run.first_piece = run.first_piece or time.perf_counter() - started
    run.size += len(piece)
    run.digest.update(piece)


def synthetic(width: int = WIDTH, height: int = HEIGHT, frames: int = FRAMES) -> Source:
    """A source whose every generator gives the same planes."""
    generator = np.random.default_rng(5)
    margin = 3 * frames + 64
    picture = [
        _texture(generator, height + margin, width + margin, 70.0),
        *(_texture(generator, (height + margin) // 2, (width + margin) // 2, 25.0) for _ in range(2)),
    ]
    grain = generator.normal(0, 1.5, (height + 64, width + 64)).round().astype(np.int8).view(np.uint8)

    def chunks() -> Generator[Chunk, None, None]:
        for start in range(0, frames, CHUNK_FRAMES):
            due = time.perf_counter() + CHUNK_SECONDS
            planes = np.empty((min(CHUNK_FRAMES, frames - start), 3 * height // 2, width), np.uint8)
            for offset, out in enumerate(planes):
                _paint(out, picture, grain, start + offset, height)
            time.sleep(max(0.0, due - time.perf_counter()))
            yield partial(np.asarray, planes)
            del planes

    return chunks


def _texture(generator: np.random.Generator, height: int, width: int, depth: float) -> Planes:
    """Smooth noise of four octaves around 128, `depth` levels deep."""
    total = np.zeros((height, width))
    for octave in range(4):
        cell = 128 >> octave
        grid = generator.uniform(-1, 1, (height // cell + 2, width // cell + 2))
        rows, columns = np.arange(height) / cell, np.arange(width) / cell
        along = np.stack([np.interp(columns, np.arange(grid.shape[1]), row) for row in grid])
        low = rows.astype(int)
        part = (rows - low)[:, None]
        total += ((1 - part) * along[low] + part * along[low + 1]) / 2**octave
    return (128 + depth * total / 2).clip(30, 220).astype(np.uint8)


def _paint(out: Planes, picture: list[Planes], grain: Planes, frame: int, height: int) -> None:
    """One frame's planes: the picture further on, and grain from another place."""
    width, (y, x) = out.shape[1], np.random.default_rng(frame).integers(0, 64, 2)
    luma = picture[0][2 * frame : 2 * frame + height, 3 * frame : 3 * frame + width]
    # Levels stay within 30 to 220 and grain within 12: the sum does not wrap.
    np.add(luma, grain[y : y + height, x : x + width], out=out[:height])
    chroma = out[height:].reshape(2, height // 2, width // 2)
    for plane, texture in zip(chroma, picture[1:], strict=True):
        top, left = frame, 3 * frame // 2
        plane[:] = texture[top : top + height // 2, left : left + width // 2]


def tone(frames: int) -> NDArray[np.float32]:
    """A soundtrack [2, samples] as long as the frames, to the latent of 1/40 s."""
    at = np.arange(round(frames / 24 * 40) * 800) / RATE
    return np.stack([0.3 * np.sin(2 * np.pi * hertz * at) for hertz in (440, 660)]).astype(np.float32)


def main(side: str, container: str) -> None:
    """Runs one side over the synthetic source, and prints what it took and the most memory that the process had."""
    source, waveform = synthetic(), tone(FRAMES)
    run = SIDES[side](source, waveform, (WIDTH, HEIGHT), default_media(container))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({**run.as_json(), "peak_memory_bytes": peak}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
