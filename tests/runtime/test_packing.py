"""The packed layout against diffusers' own layout, latent and rotary code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AfterDenoiseStep
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import packing
from runtime.schedule import AUDIO_CONDITION_SLOT, VIDEO_SLOT, VISUAL_CONDITION_SLOT, Schedule

PATCH = (1, 2, 2)

sizes = st.fixed_dictionaries(
    {
        "text_rows": st.integers(1, 700),
        "latent_frames": st.integers(1, 21).map(lambda n: 5 * n + 2),
        "latent_height": st.integers(8, 48).map(lambda n: 2 * n),
        "latent_width": st.integers(8, 48).map(lambda n: 2 * n),
        "audio_latents": st.integers(1, 603),
    }
)


def reference_layout(text_rows, latent_frames, latent_height, latent_width, audio_latents):
    tags = torch.ones(text_rows, dtype=torch.long)
    return MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        tags,
        latent_frames,
        latent_height,
        latent_width,
        audio_latents,
        PATCH,
        audio_channels=2,
        audio_tag=2,
        video_tag=0,
    )


@settings(max_examples=40, deadline=None)
@given(sizes)
def test_layout_is_bit_equal_to_diffusers(size):
    layout = packing.t2va_layout(**size)
    positions, tags, video, audio, text, _, _ = reference_layout(**size)
    assert layout.position_ids.dtype == torch.float64
    assert torch.equal(layout.position_ids, positions)
    assert torch.equal(layout.token_tags, tags)
    for ours, theirs in ((layout.video_indices, video), (layout.audio_indices, audio), (layout.text_indices, text)):
        assert torch.equal(ours, theirs)
    assert layout.rows == len(tags)


def test_released_canvas_has_the_positions_of_the_specification():
    # spec/model.md 3.3: 1344x768 spans h 3.9051 .. 27.0870 and w -5.1660 .. 36.1581.
    positions = packing.t2va_layout(537, 72, 48, 84, 405).position_ids
    assert len(positions) == 73_386 + 537
    video = positions[537 + 810 :]
    assert video[:, 1].min() == pytest.approx(3.9051, abs=1e-4)
    assert video[:, 1].max() == pytest.approx(27.0870, abs=1e-4)
    assert video[:, 2].min() == pytest.approx(-5.1660, abs=1e-4)
    assert video[:, 2].max() == pytest.approx(36.1581, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(sizes, st.integers(1, 49))
def test_rows_get_the_timesteps_that_diffusers_gives_them(size, forwards):
    layout = packing.t2va_layout(**size)
    _, _, video, audio, _, _, _ = reference_layout(**size)
    slots = Schedule.uniform(forwards, 12.0, 3.0).slots()
    for step in {0, forwards // 2, forwards - 1}:
        distinct, inverse = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            video, audio, 0, 0, size["text_rows"], float(slots[step, 0]), float(slots[step, 1]), 1.0, 1.0
        )
        assert torch.equal(slots[step][layout.timestep_index], distinct[inverse])


def test_modulation_index_is_slot_times_three_plus_tag():
    layout = packing.t2va_layout(5, 7, 16, 16, 11)
    assert torch.equal(layout.modulation_index, layout.timestep_index * 3 + layout.token_tags)
    assert layout.modulation_index[:5].tolist() == [1] * 5
    assert layout.modulation_index[layout.target_audio].tolist() == [1 * 3 + 2] * 22
    assert set(layout.modulation_index[layout.target_video].tolist()) == {0}


@settings(max_examples=25, deadline=None)
@given(sizes)
def test_targets_and_row_order_of_text_to_video_follow_the_packed_order(size):
    layout = packing.t2va_layout(**size)
    assert torch.equal(layout.row_order, torch.arange(layout.rows))
    assert torch.equal(torch.arange(layout.rows)[layout.target_audio], layout.audio_indices)
    assert torch.equal(torch.arange(layout.rows)[layout.target_video], layout.video_indices)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_gathering_by_row_order_puts_condition_rows_where_diffusers_scatters_them(text, picture, sound, audio, video):
    def rows(count):
        return np.zeros((count, 3))

    layout = packing.assemble(
        [
            packing.Segment("text", 1, VIDEO_SLOT, rows(text)),
            packing.Segment("video", 0, VISUAL_CONDITION_SLOT, rows(picture)),
            packing.Segment("audio", 2, AUDIO_CONDITION_SLOT, rows(sound)),
            packing.Segment("audio", 2, 1, rows(audio), target=True),
            packing.Segment("video", 0, VIDEO_SLOT, rows(video), target=True),
        ]
    )
    streams = [torch.randn(text, 4), torch.randn(sound + audio, 4), torch.randn(picture + video, 4)]
    gathered = torch.cat(streams)[layout.row_order]
    scattered = torch.zeros(layout.rows, 4)
    for values, places in zip(streams, (layout.text_indices, layout.audio_indices, layout.video_indices), strict=True):
        scattered.index_copy_(0, places, values)
    assert torch.equal(gathered, scattered)
    assert torch.equal(gathered[layout.target_video], streams[2][picture:])
    assert torch.equal(gathered[layout.target_audio], streams[1][sound:])


def test_a_layout_without_exactly_one_video_target_is_refused():
    segment = packing.Segment("audio", 2, 1, np.zeros((4, 3)), target=True)
    with pytest.raises(ValueError, match="0 generated video segments"):
        packing.assemble([segment])


@settings(max_examples=15, deadline=None)
@given(sizes)
def test_rotary_tables_are_the_halves_of_diffusers_tables_bit_for_bit(size):
    positions = packing.t2va_layout(**size).position_ids
    cos, sin = packing.rotary_tables(positions, 16, 10000.0)
    their_cos, their_sin = MiniMaxH3RotaryPosEmbed(16, 10000.0)(positions)
    assert cos.shape == (len(positions), 48)
    assert cos.dtype == torch.float32
    assert torch.equal(torch.cat([cos, cos], -1), their_cos)
    assert torch.equal(torch.cat([sin, sin], -1), their_sin)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 20), st.integers(0, 2**32))
def test_latents_pack_as_in_diffusers_and_unpack_as_in_its_decode_step(frames, height, width, audio_latents, seed):
    generator = torch.Generator().manual_seed(seed)
    video = torch.randn(1, 24, frames, 2 * height, 2 * width, generator=generator)
    audio = torch.randn(2, 32, audio_latents, generator=generator)
    rows, audio_rows = packing.patchify_video(video), packing.pack_audio(audio)
    assert torch.equal(rows, patchify_video_latents(video, PATCH))
    state = MiniMaxH3AfterDenoiseStep().init_pipeline()(
        latents=rows,
        audio_latents=audio_rows,
        num_latent_frames=frames,
        latent_height=2 * height,
        latent_width=2 * width,
        num_audio_latents=audio_latents,
    )
    assert torch.equal(state.get("latents"), video)
    assert torch.equal(state.get("audio_latents"), audio)
    assert torch.equal(packing.unpatchify_video(rows, frames, 2 * height, 2 * width), video)
    assert torch.equal(packing.unpack_audio(audio_rows, audio_latents), audio)


def test_latents_that_the_patch_does_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"multiples of \(1, 2, 2\)"):
        packing.patchify_video(torch.zeros(1, 24, 7, 15, 16))
