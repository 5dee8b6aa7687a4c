"""The noise of a request, in the two seed conventions that public H3 servers use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from plugins.dimensions import AUDIO_CHANNELS
from plugins.schedule import VISUAL_CONDITION_TIMESTEP
from runtime.packing import Patch, patchify_video

SeedConvention = Literal["diffusers", "vllm-omni"]
"""diffusers: one CPU generator draws conditions, video, then audio. vllm-omni: each draws from a fresh one of the seed,
and conditions from a longer draw."""

Grid = tuple[int, int, int]

_CHANNELS_AT_ONCE = 4


@dataclass(frozen=True, eq=False)
class Noise:
    """Noise of one output, float32 on the CPU.

    conditions: [1, 24, T, h, w] for each picture or video that is conditioned on, in packed order. video: the state
    [1, 24, T, h, w] at sigma 1. audio_rows: the state [2A, 32] at sigma 1, already in packed row order.
    """

    conditions: tuple[torch.Tensor, ...]
    video: torch.Tensor
    audio_rows: torch.Tensor


def draw_noise(
    seed: int,
    convention: SeedConvention,
    conditions: Sequence[Grid],
    video: Grid,
    audio_latents: int,
    channels: tuple[int, int],
) -> Noise:
    """The noise that a seed stands for.

    conditions and video: latent grids (T, h, w). channels: latent channels of video and of audio. The order of draws is
    part of what a seed means (spec/model.md 4.4): under `diffusers` bit-equal to what its
    MiniMaxH3PrepareConditionLatentsStep and MiniMaxH3PrepareLatentsStep draw from one generator. Raises ValueError on
    an unknown convention.
    """
    rows = (AUDIO_CHANNELS * audio_latents, channels[1])
    if convention == "diffusers":
        generator = _generator(seed)
        drawn = [_normal((1, channels[0], *grid), generator) for grid in (*conditions, video)]
        return Noise(tuple(drawn[:-1]), drawn[-1], _normal(rows, generator))
    if convention == "vllm-omni":
        # Long enough for the clip and one frame of every condition, whatever this condition's own length.
        frames = video[0] + len(conditions)
        drawn = [_beginning(seed, channels[0], max(frames, grid[0]), grid) for grid in conditions]
        clip = _normal((1, channels[0], *video), _generator(seed))
        return Noise(tuple(drawn), clip, _normal(rows, _generator(seed)))
    raise ValueError(f"seed_convention: {convention!r} is not one of diffusers, vllm-omni")


def augmented(rows: torch.Tensor, noise: Noise, patch: Patch = (1, 2, 2)) -> torch.Tensor:
    """Condition rows [Nc, 96] float32 at the level where they are held, 0.999 of them and 0.001 of noise.

    The released model was trained with its conditions slightly noised. Raises ValueError when the rows are not those of
    the conditions that the noise was drawn for.
    """
    pieces = [patchify_video(condition, patch) for condition in noise.conditions]
    expected = sum(len(piece) for piece in pieces)
    if len(rows) != expected:
        raise ValueError(f"rows: {len(rows)} condition rows, there must be {expected}")
    level = torch.tensor(VISUAL_CONDITION_TIMESTEP, dtype=torch.float32)
    mixed = [level * clean + (1.0 - level) * piece for clean, piece in zip(_split(rows, pieces), pieces, strict=True)]
    return torch.cat(mixed) if mixed else rows


def _split(rows: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch.split(rows, [len(piece) for piece in pieces])


def _beginning(seed: int, channels: int, frames: int, grid: Grid) -> torch.Tensor:
    """The first frames of a draw [1, channels, frames, h, w] from a fresh generator."""
    generator = _generator(seed)
    # A few channels at a time, so that a large picture's draw for the length of the clip is never held whole. The
    # generator makes numbers in groups of 16, and both sides of a latent grid are even: the numbers are the same.
    pieces = []
    for start in range(0, channels, _CHANNELS_AT_ONCE):
        count = min(_CHANNELS_AT_ONCE, channels - start)
        pieces.append(_normal((1, count, frames, *grid[1:]), generator)[:, :, : grid[0]].clone())
    return torch.cat(pieces, dim=1)


def _normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _generator(seed: int) -> torch.Generator:
    # On a GPU the same seed would draw other numbers: the CPU generator makes a seed portable.
    return torch.Generator(device="cpu").manual_seed(seed)
