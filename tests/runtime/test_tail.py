"""Decoding and encoding side by side: the bytes of one thread, what is alive meanwhile, and how every path ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.events import Cancellation, Cancelled
from runtime.mux import MediaOptions, Mp4Writer, MuxError
from runtime.tail import CHUNKS, ENCODER_THREAD, encode_behind
from tests.mp4.serial import RATE, planes_of, write_pieces

HEIGHT, WIDTH, FRAMES, CHUNK = 128, 96, 90, 17
OPTIONS = MediaOptions(crf=18, preset="veryfast", audio_bitrate=128_000)
WAVEFORM = 0.3 * torch.sin(torch.arange(2 * 120_000).view(2, -1) * 0.1)
PIXELS = torch.randint(
    0, 256, (FRAMES, HEIGHT, WIDTH, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
)
PLANES = planes_of(PIXELS, OPTIONS)


class Stop(Exception):
    """Raised where a path is to end."""


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = _tasks()
    yield
    assert not [one for one in threading.enumerate() if one.name == ENCODER_THREAD]
    assert_no_more_tasks_than(before)


def _tasks():
    return len(list(Path("/proc/self/task").iterdir()))


def assert_no_more_tasks_than(before):
    """x264's threads end with their encoder. A thread that was joined may still be on its way out of the kernel."""
    for _ in range(200):
        if _tasks() <= before:
            return
        time.sleep(0.02)
    raise AssertionError(f"{_tasks()} threads, {before} before")


def parts():
    return [PLANES[start : start + CHUNK] for start in range(0, FRAMES, CHUNK)]


def chunks_of(arrays):
    for array in arrays:
        yield lambda array=array: array


def overlapped(chunks, options=OPTIONS, cancellation=None, deliver=None, waveform=WAVEFORM):
    pieces = []
    writer = Mp4Writer(WIDTH, HEIGHT, RATE, options, deliver or (lambda piece: pieces.append((piece, writer.frames))))
    try:
        encode_behind(chunks, waveform.numpy(), writer, cancellation or Cancellation())
    finally:
        with pytest.raises(MuxError, match="closed"):
            writer.finish()
    return pieces


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        replace(OPTIONS, container="fragmented"),
        replace(OPTIONS, threads=2, preset="fast"),
        replace(OPTIONS, crf=None, video_bitrate=300_000),
    ],
)
def test_two_threads_write_the_pieces_of_one(options):
    assert overlapped(chunks_of(parts()), options) == write_pieces(PIXELS, WAVEFORM, options, CHUNK)


def test_encoding_begins_before_the_second_chunk_is_asked_for_and_ends_after_the_last():
    begun = threading.Event()
    asked = []

    def first():
        begun.set()
        return PLANES[:CHUNK]

    def chunks():
        yield first
        asked.append(begun.wait(30))
        yield lambda: PLANES[CHUNK:]

    assert overlapped(chunks())
    assert asked == [True], "the encoder took the first chunk while the second was being made"


def test_no_more_chunks_are_alive_than_the_bound():
    alive, most = [], []

    def chunks():
        for start in range(0, FRAMES, 5):
            # A copy: an array of its own, which is freed when the last of its users lets go.
            array = PLANES[start : start + 5].copy()
            alive.append(weakref.ref(array))
            most.append(sum(one() is not None for one in alive))
            yield partial(lambda array: array, array)
            del array

    overlapped(chunks())
    assert len(most) == FRAMES // 5
    assert max(most) == CHUNKS


def test_decoding_waits_for_a_slow_encoder():
    taken, release = [], threading.Event()

    def slow(number):
        def chunk():
            release.wait(30)
            return PLANES[5 * number : 5 * number + 5]

        return chunk

    def chunks():
        for number in range(6):
            taken.append(number)
            if number == CHUNKS - 1:
                threading.Timer(0.3, release.set).start()
            if number == CHUNKS:
                assert release.is_set(), "one chunk more than the bound was asked for while the first was in work"
            yield slow(number)

    overlapped(chunks())
    assert taken == list(range(6))


def failing(after, error):
    yield from list(chunks_of(parts()))[:after]
    raise error


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_error_of_the_decoder_ends_both(after):
    with pytest.raises(Stop):
        overlapped(failing(after, Stop()))


def test_an_error_of_the_encoder_ends_both_and_the_source_is_closed():
    closed = []

    def chunks():
        try:
            for _ in range(1000):
                yield lambda: np.zeros((1, 10, 10), np.uint8)
        finally:
            closed.append(True)

    with pytest.raises(MuxError, match="frames"):
        overlapped(chunks())
    assert closed == [True]


def test_a_soundtrack_that_cannot_be_encoded_is_told():
    with pytest.raises(MuxError, match="audio"):
        overlapped(chunks_of(parts()), waveform=torch.full((2, 800), float("nan")))


def test_a_chunk_that_does_not_arrive_is_told():
    def lost():
        raise Stop

    with pytest.raises(Stop):
        overlapped(iter_of(lost))


def iter_of(*chunks):
    yield from chunks


def test_a_receiver_that_fails_ends_both():
    def refuse(piece):
        raise Stop

    with pytest.raises(Stop):
        overlapped(chunks_of(parts()), replace(OPTIONS, container="fragmented"), deliver=refuse)


def test_cancelling_while_the_decoder_waits_for_the_encoder_ends_both():
    cancellation, release = Cancellation(), threading.Event()

    def stuck():
        cancellation.cancel()
        release.wait(30)
        return PLANES[:CHUNK]

    def chunks():
        yield stuck
        try:
            for _ in range(1000):
                yield lambda: PLANES[:CHUNK]
        finally:
            release.set()

    def let_go():
        # The encoder must be free to see that it is to stop.
        threading.Timer(0.2, release.set).start()
        return cancellation.cancelled

    with pytest.raises(Cancelled, match="the next frames"):
        overlapped(chunks(), cancellation=Cancellation(let_go))


def test_cancelling_at_the_end_delivers_nothing_more():
    cancellation = Cancellation()

    def last():
        cancellation.cancel()
        return PLANES

    pieces = []
    with pytest.raises(Cancelled, match="the last frames"):
        overlapped(iter_of(last), cancellation=cancellation, deliver=pieces.append)
    assert pieces == []


def test_an_interrupt_of_the_decoding_thread_ends_both():
    with pytest.raises(KeyboardInterrupt):
        overlapped(failing(2, KeyboardInterrupt()))


def test_a_failure_keeps_no_encoder_alive():
    """The error's traceback leads to the thread's frame: with a cycle in it the encoder would live on."""
    gc.collect()
    gc.disable()
    try:
        before = _tasks()
        with pytest.raises(MuxError):
            overlapped(chunks_of([PLANES[:CHUNK], np.zeros((1, 2, 2), np.uint8)]))
        assert_no_more_tasks_than(before)
    finally:
        gc.enable()


def test_encoding_leaves_the_interpreter_to_the_decoding_thread():
    """PyAV lets go of the GIL in the encoder: a thread of plain Python runs on during one long call of it."""
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1

    frames = np.random.default_rng(0).integers(0, 256, (8, 3 * 512 // 2, 512), np.uint8)
    options = replace(OPTIONS, preset="veryslow", threads=1)
    counter = threading.Thread(target=count)
    with Mp4Writer(512, 512, RATE, options, lambda piece: None) as writer:
        writer.write_audio(WAVEFORM.numpy())
        # Fewer than x264 looks ahead: all of the work is in the one call that flushes it.
        writer.write_frames(frames)
        counter.start()
        before = counted[0]
        writer.finish()
        during = counted[0] - before
        stop.set()
        counter.join()
    # A call that held it would let the counter in only between calls, for a switch interval of 5 ms a time.
    assert during > 10_000
