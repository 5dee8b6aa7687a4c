"""Initial noise against diffusers' latent preparation, and the other convention against its description."""

from __future__ import annotations

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLatentsStep
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.packing import patchify_video
from runtime.rng import NoiseGenerators, initial_noise

SHAPE, AUDIO_LATENTS = (24, 7, 16, 20), 37


def draw(seed, convention, shape=SHAPE, audio_latents=AUDIO_LATENTS):
    return initial_noise(NoiseGenerators.seeded(seed, convention), shape, audio_latents, 32)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    frames=st.integers(1, 4).map(lambda n: 5 * n + 2),
    height=st.integers(8, 12).map(lambda n: 2 * n),
    width=st.integers(8, 12).map(lambda n: 2 * n),
    audio_latents=st.integers(1, 200),
)
def test_diffusers_convention_is_bit_equal_to_diffusers(seed, frames, height, width, audio_latents):
    noise = draw(seed, "diffusers", (24, frames, height, width), audio_latents)
    state = MiniMaxH3PrepareLatentsStep().init_pipeline()(
        num_latent_frames=frames,
        latent_height=height,
        latent_width=width,
        num_audio_latents=audio_latents,
        generator=torch.Generator().manual_seed(seed),
    )
    assert torch.equal(patchify_video(noise.video), state.get("latents"))
    assert torch.equal(noise.audio_rows, state.get("audio_latents"))


def test_vllm_omni_convention_starts_both_streams_from_the_seed():
    noise = draw(42, "vllm-omni")
    fresh = torch.Generator().manual_seed(42)
    assert torch.equal(noise.audio_rows, torch.randn(2 * AUDIO_LATENTS, 32, generator=fresh))
    assert torch.equal(noise.video, draw(42, "diffusers").video)
    assert not torch.equal(noise.audio_rows, draw(42, "diffusers").audio_rows)


def test_another_seed_gives_other_noise():
    assert not torch.equal(draw(1, "diffusers").video, draw(2, "diffusers").video)


def test_drawing_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    draw(5, "vllm-omni")
    assert torch.equal(before, torch.get_rng_state())


def test_an_unknown_convention_is_refused_with_the_legal_ones():
    with pytest.raises(ValueError, match="diffusers, vllm-omni"):
        NoiseGenerators.seeded(1, "cuda")
