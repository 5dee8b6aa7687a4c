"""The packed layout against diffusers' own layout, latent and rotary code."""

from __future__ import annotations

import functools
import operator
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed
from diffusers.modular_pipelines.minimax_h3 import before_denoise
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AfterDenoiseStep
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugins.schedule import AUDIO_CONDITION_SLOT, VIDEO_SLOT, VISUAL_CONDITION_SLOT, Schedule
from runtime import packing
from runtime.packing import Condition

PATCH = (1, 2, 2)

even = st.integers(4, 12).map(lambda n: 2 * n)
latent_frames = st.integers(1, 21).map(lambda n: 5 * n + 2)
sizes = st.fixed_dictionaries(
    {
        "text_tags": st.lists(st.integers(0, 1), min_size=1, max_size=300).map(torch.tensor),
        "latent_frames": latent_frames,
        "latent_height": even,
        "latent_width": even,
        "audio_latents": st.integers(1, 603),
    }
)
images = st.builds(lambda height, width: Condition("image", "reference", 1, height, width), even, even)
sounds = st.builds(lambda latents: Condition("audio", "reference", audio_latents=latents), st.integers(80, 600))
videos = st.builds(
    lambda *numbers: Condition("video", "reference", *numbers),
    latent_frames,
    even,
    even,
    st.just(0) | st.integers(80, 600),
)
references = st.permutations("iiivvs").flatmap(
    lambda order: st.tuples(*({"i": images, "v": videos, "s": sounds}[kind] for kind in order))
)
some_references = st.lists(st.one_of(images, videos, sounds), min_size=1, max_size=5)

# 37 and 32 latent frames: the pairwise sum of their spans and the sequential one differ in the last bit.
FIRST, LAST = ((Condition("image", role, 1, 16, 20),) for role in ("first", "last"))
CLIP = {"latent_frames": 37, "latent_height": 16, "latent_width": 20, "audio_latents": 207}
IMAGE = Condition("image", "reference", 1, 128, 160)
SQUARE = Condition("image", "reference", 1, 128, 128)
SILENT = Condition("video", "reference", 32, 20, 16)
SOUNDING = Condition("video", "reference", 32, 20, 16, 178)
LONG_SOUND = Condition("video", "reference", 17, 16, 28, 480)
SOUND = Condition("audio", "reference", audio_latents=113)
CASES = {
    "text only": (),
    "first keyframe": FIRST,
    "last keyframe": LAST,
    "both keyframes": (*FIRST, *LAST),
    "one image": (IMAGE,),
    "two images": (IMAGE, SQUARE),
    "silent video": (SILENT,),
    "video with sound": (SOUNDING,),
    "image and sound": (IMAGE, SOUND),
    "everything": (SOUND, IMAGE, SOUNDING, SQUARE, LONG_SOUND, IMAGE),
}


def sequential(values):
    """The sum that Python's `sum` was before 3.12."""
    return functools.reduce(operator.add, values, 0)


@pytest.fixture(autouse=True)
def plain_sum(monkeypatch):
    """diffusers means a sequential sum and calls `sum`, which compensates from Python 3.12 on."""
    if sys.version_info >= (3, 12):
        monkeypatch.setattr(before_denoise, "sum", sequential, raising=False)


@dataclass(frozen=True)
class ReferenceKind:
    """What diffusers' layout asks of a reference besides its latents."""

    kind: str
    has_audio: bool


def reference_layout(text_tags, conditions, latent_frames, latent_height, latent_width, audio_latents):
    """diffusers' layout; conditions are its keyframes, or else its references."""
    clip = (latent_frames, latent_height, latent_width, audio_latents, PATCH)
    names = {"audio_channels": 2, "audio_tag": 2, "video_tag": 0}
    if all(condition.role != "reference" for condition in conditions):
        anchors = tuple(condition.role for condition in conditions)
        return MiniMaxH3PrepareLayoutStep.build_packed_sequence(text_tags, *clip, **names, keyframe_anchors=anchors)
    pictures = [condition for condition in conditions if condition.latent_frames]
    latents = [(each.latent_frames, each.latent_height, each.latent_width) for each in pictures]
    rows = [2 * condition.audio_latents for condition in conditions if condition.audio_latents]
    return MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        text_tags,
        [ReferenceKind(condition.kind, condition.audio_latents > 0) for condition in conditions],
        [torch.empty(1, 24, *shape, device="meta") for shape in latents],
        [torch.empty(count, 32, device="meta") for count in rows],
        *clip,
        **names,
    )


def assert_bit_equal(size, conditions):
    layout = packing.layout(conditions=conditions, **size)
    positions, tags, video, audio, text, condition_video, condition_audio = reference_layout(
        conditions=conditions, **size
    )
    assert layout.position_ids.dtype == torch.float64
    assert torch.equal(layout.position_ids, positions)
    assert torch.equal(layout.token_tags, tags)
    for ours, theirs in ((layout.video_indices, video), (layout.audio_indices, audio), (layout.text_indices, text)):
        assert torch.equal(ours, theirs)
    assert (layout.condition_video, layout.condition_audio) == (condition_video, condition_audio)
    assert layout.rows == len(tags)


@pytest.mark.parametrize("conditions", CASES.values(), ids=CASES)
def test_each_kind_of_request_has_the_layout_of_diffusers(conditions):
    tags = torch.ones(90, dtype=torch.long)
    tags[6:70] = 0
    assert_bit_equal({"text_tags": tags, **CLIP}, conditions)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, st.lists(st.sampled_from(["first", "last"]), unique=True))
def test_keyframes_lie_where_diffusers_puts_them(size, roles):
    grid = size["latent_height"], size["latent_width"]
    assert_bit_equal(size, [Condition("image", role, 1, *grid) for role in roles])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, some_references | references)
def test_references_lie_where_diffusers_puts_them(size, conditions):
    assert_bit_equal(size, conditions)


def test_released_canvas_has_the_positions_of_the_specification():
    # spec/model.md 3.3: 1344x768 spans h 3.9051 .. 27.0870 and w -5.1660 .. 36.1581.
    positions = packing.layout(torch.ones(537), (), 72, 48, 84, 405).position_ids
    assert len(positions) == 73_386 + 537
    video = positions[537 + 810 :]
    assert video[:, 1].min() == pytest.approx(3.9051, abs=1e-4)
    assert video[:, 1].max() == pytest.approx(27.0870, abs=1e-4)
    assert video[:, 2].min() == pytest.approx(-5.1660, abs=1e-4)
    assert video[:, 2].max() == pytest.approx(36.1581, abs=1e-4)


# The released shifts, and one under which video passes the level of its conditions.
@pytest.mark.parametrize(("video_shift", "audio_shift"), [(12.0, 3.0), (0.01, 3.0)])
@pytest.mark.parametrize("conditions", CASES.values(), ids=CASES)
def test_rows_get_the_timesteps_that_diffusers_gives_them_at_every_step(conditions, video_shift, audio_shift):
    size = {"text_tags": torch.ones(9, dtype=torch.long), **CLIP}
    layout = packing.layout(conditions=conditions, **size)
    _, _, video, audio, text, condition_video, condition_audio = reference_layout(conditions=conditions, **size)
    pipeline = MiniMaxH3SetTimestepsStep().init_pipeline()
    schedulers = (MiniMaxH3Scheduler(shift=shift) for shift in (video_shift, audio_shift))
    pipeline.update_components(**dict(zip(("scheduler", "audio_scheduler"), schedulers, strict=True)))
    plan = pipeline(
        num_inference_steps=13,
        video_indices=video,
        audio_indices=audio,
        text_indices=text,
        num_condition_video_rows=condition_video,
        num_condition_audio_rows=condition_audio,
        output="row_timestep_plan",
    )
    slots = Schedule.uniform(12, video_shift, audio_shift).slots()
    assert len(plan) == len(slots) == 12
    for step, (distinct, inverse) in zip(slots, plan, strict=True):
        assert torch.equal(step[layout.timestep_index], distinct[inverse])


def test_modulation_index_is_slot_times_three_plus_tag():
    layout = packing.layout(torch.ones(5, dtype=torch.long), (), 7, 16, 16, 11)
    assert torch.equal(layout.modulation_index, layout.timestep_index * 3 + layout.token_tags)
    assert layout.modulation_index[:5].tolist() == [1] * 5
    assert layout.modulation_index[layout.target_audio].tolist() == [1 * 3 + 2] * 22
    assert set(layout.modulation_index[layout.target_video].tolist()) == {0}


@settings(max_examples=25, deadline=None)
@given(sizes)
def test_targets_and_row_order_of_text_to_video_follow_the_packed_order(size):
    layout = packing.layout(conditions=(), **size)
    assert torch.equal(layout.row_order, torch.arange(layout.rows))
    assert torch.equal(torch.arange(layout.rows)[layout.target_audio], layout.audio_indices)
    assert torch.equal(torch.arange(layout.rows)[layout.target_video], layout.video_indices)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_gathering_by_row_order_puts_condition_rows_where_diffusers_scatters_them(text, picture, sound, audio, video):
    def segment(stream, tag, slot, count, target=False):
        return packing.Segment(stream, np.full(count, tag), slot, np.zeros((count, 3)), target)

    layout = packing.assemble(
        [
            segment("text", 1, VIDEO_SLOT, text),
            segment("video", 0, VISUAL_CONDITION_SLOT, picture),
            segment("audio", 2, AUDIO_CONDITION_SLOT, sound),
            segment("audio", 2, 1, audio, target=True),
            segment("video", 0, VIDEO_SLOT, video, target=True),
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
    segment = packing.Segment("audio", np.full(4, 2), 1, np.zeros((4, 3)), target=True)
    with pytest.raises(ValueError, match="0 generated video segments"):
        packing.assemble([segment])


@settings(max_examples=15, deadline=None)
@given(sizes)
def test_rotary_tables_are_the_halves_of_diffusers_tables_bit_for_bit(size):
    positions = packing.layout(conditions=(), **size).position_ids
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
