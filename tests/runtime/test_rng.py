"""Noise against diffusers' latent preparation, and the other convention against its description."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareConditionLatentsStep,
    MiniMaxH3PrepareLatentsStep,
)
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.packing import patchify_video
from runtime.rng import augmented, draw_noise

CLIP, AUDIO_LATENTS = (7, 16, 20), 37
CONDITIONS = [(1, 16, 20), (2, 18, 22), (12, 16, 16)]

even = st.integers(8, 12).map(lambda n: 2 * n)
grids = st.tuples(st.sampled_from([1, 7, 12]), even, even)


class PrepareSteps(SequentialPipelineBlocks):
    """diffusers' two draws, in the order of its pipelines."""

    model_name = "minimax-h3"
    block_classes: ClassVar = [MiniMaxH3PrepareConditionLatentsStep, MiniMaxH3PrepareLatentsStep]
    block_names: ClassVar = ["conditions", "latents"]


def draw(seed, convention, conditions=(), clip=CLIP, audio_latents=AUDIO_LATENTS):
    return draw_noise(seed, convention, conditions, clip, audio_latents, (24, 32))


def clean(conditions, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((1, 24, *grid), generator=generator) for grid in conditions]


def rows_of(latents):
    return torch.cat([patchify_video(each) for each in latents])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**63 - 1), st.tuples(st.sampled_from([7, 22]), even, even), st.integers(1, 200))
def test_without_conditions_noise_is_bit_equal_to_diffusers(seed, clip, audio_latents):
    noise = draw(seed, "diffusers", (), clip, audio_latents)
    state = MiniMaxH3PrepareLatentsStep().init_pipeline()(
        num_latent_frames=clip[0],
        latent_height=clip[1],
        latent_width=clip[2],
        num_audio_latents=audio_latents,
        generator=torch.Generator().manual_seed(seed),
    )
    assert noise.conditions == ()
    assert torch.equal(patchify_video(noise.video), state.get("latents"))
    assert torch.equal(noise.audio_rows, state.get("audio_latents"))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**63 - 1), st.lists(grids, min_size=1, max_size=4))
def test_conditions_are_noised_and_the_rest_drawn_as_in_diffusers(seed, conditions):
    latents, pipeline = clean(conditions), PrepareSteps().init_pipeline()
    pipeline.update_components(scheduler=MiniMaxH3Scheduler(shift=12.0))
    rows = rows_of(latents)
    state = pipeline(
        condition_latents=latents,
        num_condition_video_rows=len(rows),
        num_latent_frames=CLIP[0],
        latent_height=CLIP[1],
        latent_width=CLIP[2],
        num_audio_latents=AUDIO_LATENTS,
        generator=torch.Generator().manual_seed(seed),
    )
    noise = draw(seed, "diffusers", conditions)
    assert [tuple(each.shape) for each in noise.conditions] == [(1, 24, *grid) for grid in conditions]
    assert torch.equal(augmented(rows, noise), state.get("condition_rows"))
    assert torch.equal(patchify_video(noise.video), state.get("latents"))
    assert torch.equal(noise.audio_rows, state.get("audio_latents"))


def test_vllm_omni_convention_starts_both_streams_from_the_seed():
    noise = draw(42, "vllm-omni", CONDITIONS)
    fresh = torch.Generator().manual_seed(42)
    assert torch.equal(noise.audio_rows, torch.randn(2 * AUDIO_LATENTS, 32, generator=fresh))
    assert torch.equal(noise.video, draw(42, "diffusers").video)
    assert not torch.equal(noise.audio_rows, draw(42, "diffusers").audio_rows)


def test_vllm_omni_convention_draws_each_condition_as_long_as_clip_and_conditions():
    noise = draw(42, "vllm-omni", CONDITIONS)
    for grid, found in zip(CONDITIONS, noise.conditions, strict=True):
        fresh = torch.Generator().manual_seed(42)
        whole = torch.randn((1, 24, max(7 + 3, grid[0]), *grid[1:]), generator=fresh)
        assert torch.equal(found, whole[:, :, : grid[0]])


def test_rows_of_other_conditions_are_refused():
    noise = draw(1, "diffusers", CONDITIONS)
    with pytest.raises(ValueError, match="79 condition rows, there must be"):
        augmented(torch.zeros(79, 96), noise)


def test_no_conditions_leave_no_rows():
    assert augmented(torch.zeros(0, 96), draw(1, "diffusers")).shape == (0, 96)


def test_another_seed_gives_other_noise():
    assert not torch.equal(draw(1, "diffusers").video, draw(2, "diffusers").video)


def test_drawing_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    draw(5, "vllm-omni", CONDITIONS)
    assert torch.equal(before, torch.get_rng_state())


def test_an_unknown_convention_is_refused_with_the_legal_ones():
    with pytest.raises(ValueError, match="diffusers, vllm-omni"):
        draw(1, "cuda")
