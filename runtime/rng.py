"""Initial noise, in the two seed conventions that public H3 servers use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from plugins.dimensions import AUDIO_CHANNELS

SeedConvention = Literal["diffusers", "vllm-omni"]
"""diffusers: one CPU generator draws video, then audio. vllm-omni: each draws from a fresh generator of the seed."""


@dataclass(frozen=True)
class NoiseGenerators:
    """Torch CPU generators that video and audio noise are drawn from; one and the same under `diffusers`."""

    video: torch.Generator
    audio: torch.Generator

    @classmethod
    def seeded(cls, seed: int, convention: SeedConvention) -> NoiseGenerators:
        """Fresh generators for one request; raises ValueError on an unknown convention."""
        video = _generator(seed)
        if convention == "diffusers":
            return cls(video, video)
        if convention == "vllm-omni":
            return cls(video, _generator(seed))
        raise ValueError(f"seed_convention: {convention!r} is not one of diffusers, vllm-omni")


@dataclass(frozen=True, eq=False)
class InitialNoise:
    """State at sigma 1: video float32 [1, 24, T, h, w]; audio_rows float32 [2A, 32], already in packed row order."""

    video: torch.Tensor
    audio_rows: torch.Tensor


def initial_noise(
    generators: NoiseGenerators, video_shape: tuple[int, int, int, int], audio_latents: int, audio_channels: int
) -> InitialNoise:
    """Draw the initial state: video_shape is (channels, T, h, w), audio_channels the latent channels of a row.

    The order, video first and audio as rows, is part of what a seed means (spec/model.md 4.4); bit-equal to the
    latents that diffusers' MiniMaxH3PrepareLatentsStep makes, before it patchifies them.
    """
    video = torch.randn((1, *video_shape), generator=generators.video, dtype=torch.float32)
    rows = (AUDIO_CHANNELS * audio_latents, audio_channels)
    return InitialNoise(video, torch.randn(rows, generator=generators.audio, dtype=torch.float32))


def _generator(seed: int) -> torch.Generator:
    # On a GPU the same seed would draw other numbers: the CPU generator makes a seed portable.
    return torch.Generator(device="cpu").manual_seed(seed)
