"""Frame hold by presentation time, against the reference pipeline's and a definition by search."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep as Reference
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.media.timeline import held, slot

RATES = [24.0, 25.0, 30.0, 50.0, 60.0, 24000 / 1001, 30000 / 1001, 60000 / 1001]


@pytest.mark.parametrize("fps", RATES)
def test_constant_rates_are_held_as_the_reference_pipeline_holds_them(fps: float) -> None:
    count = math.floor(15 * fps)
    frames = np.zeros((count, 32, 32, 3), np.uint8)
    frames[:] = np.arange(count)[:, None, None, None] % 251
    expected = Reference._normalize_video_condition(frames, fps, 10_000, 32, 32, 1 << 20, 24.0)[:, 0, 0, 0]
    times = [Fraction(index) / Fraction(fps) for index in range(count)]
    found = held(times, slot(Fraction(count) / Fraction(fps)))
    assert [index % 251 for index in found] == expected.tolist()


@given(
    gaps=st.lists(st.integers(1, 9000), min_size=1, max_size=120),
    start=st.floats(0, 3),
    count=st.integers(1, 200),
)
def test_each_step_shows_the_last_frame_whose_slot_has_come(gaps: list[int], start: float, count: int) -> None:
    stamps = np.cumsum([0, *gaps]).tolist()
    times = [Fraction(stamp, 90_000) - Fraction(start) for stamp in stamps]
    for step, index in enumerate(held(times, count)):
        come = [one for one, time in enumerate(times) if math.floor(time * 24 + Fraction(1, 2)) <= step]
        assert index == (come[-1] if come else 0)


@given(st.fractions(-100, 100, max_denominator=90_000))
@settings(max_examples=200)
def test_a_slot_is_the_nearest_step_and_ties_go_up(time: Fraction) -> None:
    found = slot(time)
    assert Fraction(-1, 48) < Fraction(found, 24) - time <= Fraction(1, 48)
