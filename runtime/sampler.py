"""The deterministic Euler sampler (eta 0) on a data-ward velocity."""

from __future__ import annotations

import torch

from plugins.schedule import Clock


def euler_step(clock: Clock, index: int, sample: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
    """The next state of one modality after forward `index`: float32, same shape as sample and velocity.

    x0 = x + sigma v, then x' = r x + (1 - r) x0 with r = sigma_next / sigma (spec/model.md 4.2). Algebraically
    x + (sigma - sigma_next) v; this form, and a sigma for x0 that is recovered from the timestep and not read from
    the grid, are kept because their float32 rounding is that of diffusers' MiniMaxH3Scheduler.step.
    Raises ValueError on a state or velocity that is not float32 or on unequal shapes.
    """
    if sample.dtype != torch.float32 or velocity.dtype != torch.float32 or sample.shape != velocity.shape:
        raise ValueError(
            f"sample {tuple(sample.shape)} {sample.dtype} and velocity {tuple(velocity.shape)} {velocity.dtype} "
            "must be float32 of one shape"
        )
    timestep, sigma, sigma_next = (
        value.to(sample.device) for value in (clock.timesteps[index], clock.sigmas[index], clock.sigmas[index + 1])
    )
    denoised = sample + (1.0 - timestep) * velocity
    ratio = sigma_next / sigma
    return ratio * sample + (1.0 - ratio) * denoised
