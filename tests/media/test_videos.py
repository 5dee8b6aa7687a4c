"""Videos: facts and frames, against decoding the same file with PyAV alone and against what was encoded."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from itertools import pairwise

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from runtime.media.facts import VideoFacts
from runtime.media.frames import decode_video
from runtime.media.probe import probe
from runtime.media.sound import decode_sound
from runtime.refusal import RequestError
from tests.media.clips import TICKS, Track, even, grey, noise, picture, video
from tests.media.hostile import edited, set_bytes

WHERE = "VIDEOS[0]"


def facts_of(data: bytes, start: float = 0.0) -> VideoFacts:
    facts = probe(data, "video", WHERE, start)
    assert isinstance(facts, VideoFacts)
    return facts


def decoded(data: bytes, start: float = 0.0, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """All frames that the facts promise."""
    facts = facts_of(data, start)
    shown = size or (facts.width, facts.height)
    return np.stack(list(decode_video(data, facts, WHERE, start, facts.frames, shown)))


def source_frames(data: bytes) -> list[NDArray[np.uint8]]:
    """Every frame of the file as PyAV alone gives it, turned anticlockwise by its rotation, as ffmpeg and players do.

    The reference pipeline's own reader turns it the other way, so that its portrait clips from phones lie upside down.
    """
    with av.open(io.BytesIO(data)) as container:
        return [
            np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
            for frame in container.decode(container.streams.video[0])
        ]


def levels(frames: NDArray[np.uint8]) -> list[int]:
    """The index of the encoded frame that each decoded one shows."""
    known = np.array([grey(index) for index in range(31)])
    return [int(np.abs(known - frame.mean()).argmin()) for frame in frames]


@pytest.mark.parametrize(("codec", "container"), [("libx264", "mp4"), ("libx265", "mov")])
def test_a_clip_at_24_frames_a_second_comes_through_frame_by_frame(codec: str, container: str) -> None:
    data = video(even(2.5, 24), codec=codec, container=container)
    assert facts_of(data) == VideoFacts(width=256, height=256, frames=60, seconds=2.5)
    np.testing.assert_array_equal(decoded(data), np.stack(source_frames(data)))


@pytest.mark.parametrize("fps", [Fraction(24000, 1001), 25, Fraction(30000, 1001), 30, 60])
def test_other_rates_are_held_on_the_grid(fps: Fraction) -> None:
    data = video(even(2.2, fps))
    source = source_frames(data)
    slots = [math.floor(index * 24 / fps + Fraction(1, 2)) for index in range(len(source) + 1)]
    shown = zip(source, pairwise(slots), strict=True)
    expected = [frame for frame, (now, then) in shown for _ in range(then - now)]
    found = decoded(data)
    # The last frame's end is in ticks, which may round to the slot beside the exact one.
    assert abs(len(found) - len(expected)) <= 1
    length = min(len(found), len(expected))
    np.testing.assert_array_equal(found[:length], np.stack(expected)[:length])


@given(st.lists(st.sampled_from([1500, 2250, 3000, 3003, 3750, 4500]), min_size=55, max_size=75))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_variable_rate_is_held_by_its_own_times(gaps: list[int]) -> None:
    """The facts count what decoding yields, and each step shows the frame that its time asks for."""
    stamps = [0, *np.cumsum(gaps).tolist()]
    if not 2 * TICKS + 4500 < stamps[-1] < 15 * TICKS or not 24 <= (len(stamps) - 1) * TICKS / stamps[-1] <= 60:
        return
    found = decoded(video(stamps))
    slots = [math.floor(Fraction(stamp, TICKS) * 24 + Fraction(1, 2)) for stamp in stamps]
    expected = [max(index for index, one in enumerate(slots) if one <= step) for step in range(len(found))]
    assert [grey(index) for index in expected] == pytest.approx(found.mean(axis=(1, 2, 3)).tolist(), abs=3)


@pytest.mark.parametrize("rotation", [0, 90, 180, -90])
def test_rotation_metadata_turns_pixels_and_sides(rotation: int) -> None:
    data = video(even(2.1, 24), size=(320, 256), rotation=rotation, pixels=np.asarray(picture(320, 256)))
    facts = facts_of(data)
    assert (facts.width, facts.height) == ((256, 320) if rotation % 180 else (320, 256))
    np.testing.assert_array_equal(decoded(data)[5], source_frames(data)[5])


def test_a_mirrored_picture_is_shown_as_its_matrix_says() -> None:
    pixels = np.asarray(picture(320, 256))
    data = video(even(2.1, 24), size=(320, 256), pixels=pixels)
    mirrored = edited(data, b"tkhd", set_bytes(40, (-(1 << 16)).to_bytes(4, "big", signed=True)))
    np.testing.assert_array_equal(decoded(mirrored)[3], decoded(data)[3][:, ::-1])


def test_pixels_that_are_not_square_count_as_shown() -> None:
    data = video(even(2.1, 24), size=(288, 288), aspect=Fraction(4, 3), pixels=np.asarray(picture(288, 288)))
    assert (facts_of(data).width, facts_of(data).height) == (384, 288)
    expected = Image.fromarray(source_frames(data)[0]).resize((384, 288), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(decoded(data)[0], np.asarray(expected))


def test_odd_sides_are_kept() -> None:
    data = video(even(2.1, 24), size=(257, 259), pix_fmt="yuv444p", pixels=np.asarray(picture(257, 259)))
    assert (facts_of(data).width, facts_of(data).height) == (257, 259)
    np.testing.assert_array_equal(decoded(data)[7], source_frames(data)[7])


def test_frames_are_resized_by_pillows_lanczos() -> None:
    data = video(even(2.1, 24), size=(320, 256), pixels=np.asarray(picture(320, 256)))
    expected = Image.fromarray(source_frames(data)[4]).resize((512, 384), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(decoded(data, size=(512, 384))[4], np.asarray(expected))


@pytest.mark.parametrize("start", [0.51, 1.0])
def test_a_start_time_shows_what_is_on_screen_then(start: float) -> None:
    found = decoded(video(even(3.2, 24)), start)
    first = math.floor(start * 24 + 0.5)
    assert len(found) == math.floor((even(3.2, 24)[-1] / TICKS + 1 / 24 - start) * 24 + 0.5)
    expected = [grey(first + step) for step in range(len(found))]
    assert found.mean(axis=(1, 2, 3)).tolist() == pytest.approx(expected, abs=3)


def test_a_clip_that_does_not_begin_at_zero_begins_at_its_first_frame() -> None:
    late = [stamp + TICKS for stamp in even(2.5, 24)]
    data = video(late, options={"use_editlist": "0"})
    assert facts_of(data).frames == 60
    assert levels(decoded(data))[:5] == [0, 1, 2, 3, 4]


def test_an_edit_list_cuts_the_beginning() -> None:
    """The first five frames are before the edit: decoded, as later ones need them, and not shown."""
    data = video(even(3, 24))
    shift = 5 * TICKS // 24
    cut = edited(
        data, b"elst", lambda old: set_bytes(12, (int.from_bytes(old[12:16], "big") + shift).to_bytes(4, "big"))(old)
    )
    assert facts_of(cut).frames == len(decoded(cut)) == 67
    assert levels(decoded(cut))[:4] == [5, 6, 7, 8]


def test_a_fragmented_file_is_read_like_another() -> None:
    data = video(even(2.5, 24), options={"movflags": "frag_keyframe+empty_moov"}, track=Track(2.5))
    facts = facts_of(data)
    assert facts.frames == 60
    assert facts.sound is not None


def test_15_008_seconds_are_accepted_and_cut_to_15() -> None:
    stamps = even(15, 24)
    data = video([*stamps[:-1], stamps[-1] + 720])
    assert facts_of(data).frames == len(decoded(data)) == 360
    assert facts_of(data).seconds == 15


def test_a_clip_is_refused_where_its_start_leaves_less_than_2_seconds() -> None:
    data = video(even(3, 24))
    assert facts_of(data, 1.0).frames == 48
    for start in (1.01, 3.0, -0.1, math.nan, math.inf, -math.inf, 1e300):
        with pytest.raises(RequestError, match="start_time_seconds must be at least 0 and leave 2 s"):
            probe(data, "video", WHERE, start)


@pytest.mark.parametrize(
    ("codec", "layout", "container"),
    [("aac", "mono", "mov"), ("aac", "stereo", "mp4"), ("libmp3lame", "mono", "mp4"), ("libmp3lame", "stereo", "mov")],
)
def test_a_soundtrack_is_what_was_encoded_without_priming(codec: str, layout: str, container: str) -> None:
    """The same noise, at the same place: a lag of one frame (1,024 samples) would leave no correlation."""
    data = video(even(2.5, 24), track=Track(2.5, codec, 44_100, layout), container=container)
    facts = facts_of(data).sound
    assert facts is not None
    assert (facts.sample_rate, facts.channels) == (44_100, 1 if layout == "mono" else 2)
    assert 2.5 <= facts.seconds < 2.56
    found = decode_sound(data, WHERE, 0.0, 15.0).numpy()
    assert found.shape == (2, -(-facts.samples * 320 // 441))
    assert layout == "stereo" or (found[0] == found[1]).all()
    lag = _lag(found[0], noise(2.5, 44_100, facts.channels)[0])
    assert abs(lag) < 16


def _lag(found: NDArray[np.float32], sent: NDArray[np.float32]) -> int:
    """Samples at 32 kHz by which `found` comes after `sent` (44.1 kHz), by the peak of their correlation."""
    from runtime.media.resample import resample

    import torch  # isort: skip

    sent = resample(torch.from_numpy(sent)[None], 44_100, 32_000)[0].numpy()
    size = 1 << 18
    peak = np.fft.irfft(np.fft.rfft(found, size) * np.conj(np.fft.rfft(sent, size))).argmax()
    return int(peak if peak < size // 2 else peak - size)


def test_a_start_time_moves_picture_and_soundtrack_together() -> None:
    data = video(even(4, 24), track=Track(4, "aac", 32_000))
    whole = decode_sound(data, WHERE, 0.0, 15.0)
    facts = facts_of(data, 1.5)
    moved = decode_sound(data, WHERE, 1.5, 15.0)
    assert facts.sound is not None
    assert moved.shape[1] == facts.sound.samples == whole.shape[1] - 48_000
    assert (moved == whole[:, 48_000:]).all()


def test_a_soundtrack_is_cut_at_the_seconds_asked_for() -> None:
    data = video(even(4, 24), track=Track(4, "aac", 32_000))
    assert decode_sound(data, WHERE, 0.0, 2.25).shape == (2, 72_000)


def test_a_soundtrack_that_ends_before_the_start_time_is_none() -> None:
    data = video(even(6, 24), track=Track(2.0))
    assert facts_of(data).sound is not None
    assert facts_of(data, 3.0).sound is None


def test_a_soundtrack_with_more_than_two_channels_is_refused() -> None:
    with pytest.raises(RequestError, match=r"6 channels.*mono or stereo"):
        probe(video(track=Track(2.5, "aac", 44_100, "5.1")), "video", WHERE)


def test_fewer_frames_may_be_asked_for_and_not_more() -> None:
    data = video(even(2.5, 24))
    facts = facts_of(data)
    assert len(list(decode_video(data, facts, WHERE, 0.0, 22, (256, 256)))) == 22
    with pytest.raises(RequestError, match=r"61 frames.*from 1 to the video's 60"):
        next(decode_video(data, facts, WHERE, 0.0, 61, (256, 256)))
