"""The tail of a request: one thread decodes, another encodes behind it, with a bound on what lies between them.

What comes out is what one thread alone would write: the encoder takes the chunks in order, with its own settings.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from runtime.events import Cancellation
from runtime.mux import Mp4Writer

CHUNKS = 2
"""Chunks in host memory at a time: one that is encoded, and one that is decoded or waits."""

ENCODER_THREAD = "h3-encoder"

POLL_SECONDS = 0.05
"""Between looks at the cancellation while the decoding thread waits for the encoder."""

Chunk = Callable[[], NDArray[np.uint8]]
"""Gives the planes [n, 3H/2, W] of some frames, having waited for them if they are on their way from a device."""


def encode_behind(
    chunks: Generator[Chunk, None, None],
    waveform: NDArray[np.float32],
    writer: Mp4Writer,
    cancellation: Cancellation,
) -> None:
    """Draws the chunks in this thread and encodes them, behind the soundtrack [2, samples], in another; then finishes.

    The writer is that thread's alone, and closed in the end; what it delivers, it delivers there. The next chunk is
    asked for when fewer than CHUNKS are alive. Raises what `chunks`, the writer or its receiver raise, and Cancelled
    within POLL_SECONDS where it waits; neither the thread nor the writer outlives the call.
    """
    with closing(chunks), _Encoder(waveform, writer) as encoder:
        while True:
            encoder.wait_for_room(cancellation)
            chunk = next(chunks, None)
            if chunk is None:
                return encoder.finish(cancellation)
            encoder.put(chunk)


class _Encoder:
    """A thread that encodes what it is given. Leaving its context stops it within one frame and waits for that."""

    def __init__(self, waveform: NDArray[np.float32], writer: Mp4Writer) -> None:
        self._waveform = waveform
        self._writer = writer
        self._room = threading.Semaphore(CHUNKS)
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=ENCODER_THREAD)

    def __enter__(self) -> _Encoder:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._chunks.put(None)
        self._thread.join()

    def wait_for_room(self, cancellation: Cancellation) -> None:
        """Until one chunk more may be alive. Raises Cancelled, and what the thread failed with."""
        while not self._room.acquire(timeout=POLL_SECONDS):
            cancellation.raise_if_cancelled("the next frames")
        self._raise_failure()

    def put(self, chunk: Chunk) -> None:
        """Hands over the next chunk, for which there is room."""
        self._chunks.put(chunk)

    def finish(self, cancellation: Cancellation) -> None:
        """Until everything is encoded and delivered. Raises Cancelled, and what the thread failed with."""
        self._chunks.put(None)
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            cancellation.raise_if_cancelled("the last frames are encoded")
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            # Its traceback leads to this frame and to the thread's: they would keep each other, and the encoder, alive.
            del failure

    def _run(self) -> None:
        try:
            with self._writer:
                self._writer.write_audio(self._waveform)
                while self._encode_next():
                    self._room.release()
                if not self._stopped.is_set():
                    self._writer.finish()
        except BaseException as error:
            self._failure = error
            self._room.release()

    def _encode_next(self) -> bool:
        """Whether there was a chunk, and all of it was encoded: not after a stop. It is freed before this returns."""
        chunk = self._chunks.get()
        if chunk is None:
            return False
        planes = chunk()
        for place in range(len(planes)):
            if self._stopped.is_set():
                return False
            self._writer.write_frames(planes[place : place + 1])
        return True
