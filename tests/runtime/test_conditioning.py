"""Conditions from pixels and sound, against diffusers' own encoding with the same autoencoders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition

from export.checkpoint import Checkpoint, materialise
from export.miniature import write_miniature
from plugins.dimensions import Dimensions
from runtime.conditioning import (
    ConditionError,
    condition_latents,
    condition_sound,
    encoder_tiles,
    sample_posterior,
    video_moments,
)
from runtime.events import Cancellation, Cancelled, Event, Reporter, Units

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SIZES = [(1, 256, 256), (1, 384, 640), (22, 256, 256), (22, 256, 416)]
"""Frames, height, width: one tile; 2 x 3 tiles; two clips, the second filled up from 5 frames."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("conditioning") / "miniature"
    write_miniature(root, "diffusers", seed=5)
    return Checkpoint.open(root)


@pytest.fixture(scope="module")
def dimensions(checkpoint: Checkpoint) -> Dimensions:
    return checkpoint.dimensions


@pytest.fixture(scope="module")
def video_vae(checkpoint: Checkpoint) -> AutoencoderKLMiniMaxH3:
    model = AutoencoderKLMiniMaxH3(**checkpoint.config("video_vae"))
    model.load_state_dict({n: materialise(w).float() for n, w in checkpoint.parameters("video_vae").items()})
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def audio_vae(checkpoint: Checkpoint) -> AutoencoderKLMiniMaxH3Audio:
    model = AutoencoderKLMiniMaxH3Audio(**checkpoint.config("audio_vae"))
    model.load_state_dict({n: materialise(w).float() for n, w in checkpoint.parameters("audio_vae").items()})
    return model.eval().requires_grad_(False)


def units(total: int, events: list[Event] | None = None, cancellation: Cancellation | None = None) -> Units:
    sink = (lambda event: None) if events is None else events.append
    return Units("encode", total, Reporter(sink, lambda: 0.0), cancellation or Cancellation())


def video(frames: int, height: int, width: int) -> torch.Tensor:
    """Smooth moving colours with noise on top, uint8 [F, H, W, 3]."""
    generator = torch.Generator().manual_seed(frames + height + width)
    coarse = torch.rand(1, 3, max(frames // 4, 1), 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (frames, height, width), mode="trilinear")[0]
    noisy = smooth + 0.1 * torch.rand(smooth.shape, generator=generator)
    return (noisy.clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()


@pytest.mark.parametrize(("frames", "height", "width"), SIZES)
def test_latents_are_those_of_diffusers(
    frames: int, height: int, width: int, video_vae: AutoencoderKLMiniMaxH3, dimensions: Dimensions
) -> None:
    """The same convolutions in the same tiles: what is around them (colours, tiles, clips, sample) is exact."""
    pixels = video(frames, height, width)
    tiles = encoder_tiles(frames, height, width, dimensions.video_vae)
    found = condition_latents(iter(pixels), lambda x: video_vae.quant_conv(video_vae.encoder(x)), dimensions.video_vae, units(tiles))
    expected = encode_vae_condition(video_vae, pixels.permute(3, 0, 1, 2)[None], MEAN, STD)
    assert found.shape == expected.shape
    assert found.shape[2] == (1 if frames == 1 else (frames - 5) // 17 * 5 + 2)
    assert torch.equal(found, expected)
