"""Both clocks against diffusers' scheduler, distilled ladders against the published numbers."""

from __future__ import annotations

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.schedule import Schedule, ScheduleError

SHIFTS = (3.0, 6.0, 10.0, 12.0)

# spec/model.md 4.5
LADDERS = {
    "fasth3-v1 video": ([0.999, 0.749, 0.5, 0.25, 0], 12, [0.99991659, 0.972832558, 0.923076923, 0.8, 0]),
    "fasth3-v1 audio": ([0.999, 0.749, 0.5, 0.25, 0], 3, [0.999666444, 0.899519616, 0.75, 0.5, 0]),
    "fasth3-v2 video": (
        [0.999, 0.874, 0.749, 0.624, 0.5, 0.375, 0.25, 0.125, 0],
        10,
        [0.99989991, 0.985788405, 0.967575249, 0.943168077, 0.909090909, 0.857142857, 0.769230769, 0.588235294, 0],
    ),
    "turbo-4 768p": ([1, 0.75, 0.5, 0.25, 0], 6, [1, 0.947368421, 0.857142857, 0.666666667, 0]),
}


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("points", [*range(2, 61), 101, 200, 500, 999, 1000])
def test_uniform_clocks_are_bit_equal_to_diffusers(shift, points):
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(points)
    schedule = Schedule.uniform(points - 1, shift, 3.0)
    assert torch.equal(schedule.video.sigmas, scheduler.sigmas)
    assert torch.equal(schedule.video.timesteps, scheduler.timesteps)
    assert schedule.sigma_points == points
    assert schedule.forwards == points - 1


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 400), st.floats(0.1, 60, allow_nan=False))
def test_any_shift_gives_the_grid_of_diffusers(points, shift):
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(points)
    assert torch.equal(Schedule.uniform(points - 1, shift, shift).audio.sigmas, scheduler.sigmas)


@pytest.mark.parametrize("name", LADDERS)
def test_pinned_positions_give_the_published_sigmas(name):
    positions, shift, sigmas = LADDERS[name]
    clock = Schedule.from_positions(positions, shift, 3.0).video
    # The table is printed to nine digits; float32 holds about seven.
    assert clock.sigmas.tolist() == pytest.approx(sigmas, abs=1e-7)
    scheduler = MiniMaxH3Scheduler()
    scheduler.set_timesteps(sigmas=clock.sigmas)
    assert torch.equal(clock.timesteps, scheduler.timesteps)


def test_pinned_uniform_positions_agree_with_the_uniform_grid_to_one_float32_ulp():
    pinned = Schedule.from_positions([1 - k / 8 for k in range(9)], 12.0, 3.0)
    grid = Schedule.uniform(8, 12.0, 3.0)
    assert torch.allclose(pinned.video.sigmas, grid.video.sigmas, rtol=1.2e-7, atol=0)
    assert torch.allclose(pinned.audio.sigmas, grid.audio.sigmas, rtol=1.2e-7, atol=0)


def test_slots_hold_both_clocks_and_the_levels_of_conditions():
    schedule = Schedule.uniform(200, 3.0, 12.0)
    slots = schedule.slots()
    assert slots.shape == (200, 4)
    assert slots.dtype == torch.float32
    assert torch.equal(slots[:, 0], schedule.video.timesteps)
    assert torch.equal(slots[:, 1], schedule.audio.timesteps)
    # diffusers: max(float(timestep), 0.999), later stored as float32
    expected = [max(float(timestep), 0.999) for timestep in schedule.video.timesteps]
    assert torch.equal(slots[:, 2], torch.tensor(expected, dtype=torch.float32))
    assert set(slots[:, 3].tolist()) == {1.0}


def test_a_video_clock_past_the_condition_level_lifts_it():
    slots = Schedule.from_positions([1, 0.0001, 0], 3.0, 3.0).slots()
    assert slots[1, 2] == slots[1, 0] > 0.999


@pytest.mark.parametrize(
    "positions", [[], [0.0], [1, 0.5], [1, 1, 0], [0.2, 0.5, 0], [1.5, 0], [1, float("nan"), 0], [0.5, -0.1, 0]]
)
def test_impossible_positions_are_refused_by_name(positions):
    with pytest.raises(ScheduleError, match="base_schedule"):
        Schedule.from_positions(positions, 12.0, 3.0)


@pytest.mark.parametrize("shift", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_shifts_are_refused_by_name(shift):
    with pytest.raises(ScheduleError, match="shift"):
        Schedule.uniform(4, 12.0, shift)


def test_no_forward_is_refused():
    with pytest.raises(ScheduleError, match="forwards: 0"):
        Schedule.uniform(0, 12.0, 3.0)


def test_clocks_that_float32_shortens_unequally_are_refused():
    # So large a shift squeezes the first video sigmas into one float32 value; the audio clock keeps all of its.
    with pytest.raises(ScheduleError, match="sigma_points"):
        Schedule.uniform(200, 1e9, 3.0)
