"""The two clocks of a request: shifted sigma grids for video and audio, and the timestep slots of every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plugins.dimensions import TIMESTEP_SLOTS
from plugins.distilled import PinnedSchedule, falls_to_zero

VIDEO_SLOT, AUDIO_SLOT, VISUAL_CONDITION_SLOT, AUDIO_CONDITION_SLOT = range(TIMESTEP_SLOTS)
"""Slots of the modulation table: video and text rows, audio rows, visual condition rows, audio reference rows."""

VISUAL_CONDITION_TIMESTEP = 0.999
"""Level that visual conditions are noised to; they follow t_video once it is past this."""

AUDIO_CONDITION_TIMESTEP = 1.0
"""Audio references are clean."""


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message names the field, the value and the rule."""


@dataclass(frozen=True, eq=False)
class Clock:
    """Noise levels of one modality.

    sigmas: float32 [P], strictly decreasing, ending at 0. timesteps: float32 [P - 1], 1 - sigma of each forward.
    """

    sigmas: torch.Tensor
    timesteps: torch.Tensor

    @classmethod
    def from_sigmas(cls, sigmas: torch.Tensor) -> Clock:
        """A clock on a finished float32 sigma grid (t = 1 - sigma; the terminal 0 has no forward)."""
        return cls(sigmas, 1.0 - sigmas[:-1])

    @property
    def forwards(self) -> int:
        """Model evaluations of this clock."""
        return self.timesteps.numel()


@dataclass(frozen=True, eq=False)
class Schedule:
    """Both clocks of a request; step i of one runs with step i of the other in the same forward."""

    video: Clock
    audio: Clock

    def __post_init__(self) -> None:
        """Refuse clocks of unequal length (float32 may merge the first points of one under a very large shift)."""
        if self.video.forwards != self.audio.forwards:
            raise ScheduleError(
                f"sigma_points: {self.video.forwards} video forwards but {self.audio.forwards} audio forwards remain "
                "after equal sigmas are merged; use fewer points or a smaller shift"
            )

    @classmethod
    def of(
        cls, forwards: int, video_shift: float, audio_shift: float, positions: Sequence[float] | None = None
    ) -> Schedule:
        """The schedule of base positions, one more than there are forwards; None: the equally spaced ones.

        Raises ScheduleError.
        """
        if positions is None:
            return cls.uniform(forwards, video_shift, audio_shift)
        if len(positions) != forwards + 1:
            raise ScheduleError(f"base_schedule: {len(positions)} positions, {forwards} forwards need {forwards + 1}")
        return cls.from_positions(positions, video_shift, audio_shift)

    @classmethod
    def pinned(cls, schedule: PinnedSchedule) -> Schedule:
        """The only schedule of a distilled model or an adapter. Raises ScheduleError."""
        return cls.of(schedule.forwards, schedule.video_shift, schedule.audio_shift, schedule.positions)

    @classmethod
    def uniform(cls, forwards: int, video_shift: float, audio_shift: float) -> Schedule:
        """The standard schedule: forwards + 1 equally spaced base positions from 1 to 0.

        Bit-equal to diffusers' MiniMaxH3Scheduler.set_timesteps(forwards + 1) (spec/model.md 4.1).
        Raises ScheduleError.
        """
        if forwards < 1:
            raise ScheduleError(f"forwards: {forwards} is below 1, the smallest schedule")
        base = torch.linspace(1.0, 0.0, forwards + 1, dtype=torch.float32)
        return cls(*(Clock.from_sigmas(_shifted_grid(base, shift)) for shift in (video_shift, audio_shift)))

    @classmethod
    def from_positions(cls, positions: Sequence[float], video_shift: float, audio_shift: float) -> Schedule:
        """The schedule of a distilled checkpoint that pins its base positions (spec/model.md 4.5).

        Each sigma is computed in float64 and rounded once to float32. Raises ScheduleError.
        """
        _check_positions(positions)
        return cls(*(Clock.from_sigmas(_shifted_positions(positions, shift)) for shift in (video_shift, audio_shift)))

    @property
    def forwards(self) -> int:
        """Transformer evaluations of the request."""
        return self.video.forwards

    @property
    def sigma_points(self) -> int:
        """Points of each sigma grid, one more than the forwards."""
        return self.forwards + 1

    def slots(self) -> torch.Tensor:
        """Timesteps of every slot of every step, float32 [forwards, 4]; columns as the *_SLOT constants."""
        visual = self.video.timesteps.clamp(min=VISUAL_CONDITION_TIMESTEP)
        clean = torch.full_like(visual, AUDIO_CONDITION_TIMESTEP)
        return torch.stack([self.video.timesteps, self.audio.timesteps, visual, clean], dim=1)


def _check_shift(shift: float) -> None:
    if not (math.isfinite(shift) and shift > 0):
        raise ScheduleError(f"shift: {shift} is not a positive finite number")


def _shifted_grid(base: torch.Tensor, shift: float) -> torch.Tensor:
    _check_shift(shift)
    # Operation order and float32 throughout are part of the result.
    return torch.unique_consecutive(shift * base / (1 + (shift - 1) * base))


def _shifted_positions(positions: Sequence[float], shift: float) -> torch.Tensor:
    _check_shift(shift)
    sigmas = torch.tensor([shift * p / (1 + (shift - 1) * p) for p in positions], dtype=torch.float32)
    if not bool((sigmas[1:] < sigmas[:-1]).all()):
        raise ScheduleError(f"base_schedule: two positions of {list(positions)} share a float32 sigma at shift {shift}")
    return sigmas


def _check_positions(positions: Sequence[float]) -> None:
    rule = "at least two numbers, strictly decreasing, the first at most 1, the last exactly 0"
    if not falls_to_zero(positions):
        raise ScheduleError(f"base_schedule: {list(positions)} must be {rule}")
