"""Whole sampling trajectories against diffusers' scheduler."""

from __future__ import annotations

import pytest
import torch
from diffusers import MiniMaxH3Scheduler

from plugins.schedule import Schedule
from runtime.sampler import euler_step


def velocity_of(state):
    """A stand-in for the transformer that depends on the state, so that one wrong bit would spread."""
    return torch.sin(3 * state) - 0.7 * state


@pytest.mark.parametrize("forwards", [1, 4, 8, 49])
@pytest.mark.parametrize("shift", [3.0, 6.0, 10.0, 12.0])
def test_trajectories_are_bit_equal_to_diffusers(forwards, shift):
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(forwards + 1)
    clock = Schedule.uniform(forwards, shift, 3.0).video
    ours = theirs = torch.randn(64, 96, generator=torch.Generator().manual_seed(forwards))
    for index, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(velocity_of(theirs), timestep, theirs, return_dict=False)[0]
        ours = euler_step(clock, index, ours, velocity_of(ours))
        assert torch.equal(ours, theirs), f"step {index}"


def test_pinned_ladders_are_stepped_as_diffusers_steps_explicit_sigmas():
    clock = Schedule.from_positions([0.999, 0.749, 0.5, 0.25, 0], 12.0, 3.0).audio
    scheduler = MiniMaxH3Scheduler()
    scheduler.set_timesteps(sigmas=clock.sigmas)
    ours = theirs = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for index, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(velocity_of(theirs), timestep, theirs, return_dict=False)[0]
        ours = euler_step(clock, index, ours, velocity_of(ours))
    assert torch.equal(ours, theirs)


def test_the_true_velocity_leads_from_noise_to_the_data():
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(16, 96, generator=generator), torch.randn(16, 96, generator=generator)
    schedule, state = Schedule.uniform(10, 12.0, 3.0), noise
    for index in range(schedule.forwards):
        state = euler_step(schedule.video, index, state, data - noise)
    # Ten float32 steps on values of about 1: an error of some units in the last place (6e-8).
    assert torch.allclose(state, data, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_that_is_not_float32_is_refused(dtype):
    state = torch.zeros(4, 96, dtype=dtype)
    with pytest.raises(ValueError, match="float32"):
        euler_step(Schedule.uniform(4, 12.0, 3.0).video, 0, state, state)


def test_a_velocity_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="one shape"):
        euler_step(Schedule.uniform(4, 12.0, 3.0).video, 0, torch.zeros(4, 96), torch.zeros(1, 96))
