"""Sizes of keyframes and references against the arithmetic of diffusers, transformers and torchaudio's rule."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep, MiniMaxH3ResizeStep
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3Ref2VAReferenceEncoderStep,
    MiniMaxH3Ref2VATextEncoderStep,
)
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3ImageReference, MiniMaxH3VideoReference
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as their_image_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as their_video_resize

from plugins.shape import canvas_of, ratio_of
from runtime import geometry
from tests.request.sizes import RELEASED

PROCESSOR = RELEASED.processor


# Every side that a reference may have; ratios up to 2.5 either way.
sides = st.tuples(st.integers(256, 5760), st.integers(256, 5760)).filter(lambda size: 0.4 <= size[0] / size[1] <= 2.5)


@settings(max_examples=300, deadline=None)
@given(sides)
def test_keyframes_and_videos_get_the_canvas_that_diffusers_gives_them(size):
    height, width = resolve_canvas_size(*size, 32, 768, 768 * 1344)
    assert canvas_of(ratio_of("{}:{}".format(*size))) == geometry.video_size(*size, 768) == (width, height)


@settings(max_examples=300, deadline=None)
@given(sides, st.integers(8, 24).map(lambda n: 32 * n))
def test_smaller_videos_get_the_canvas_that_diffusers_gives_them(size, short_edge):
    height, width = resolve_canvas_size(*size, 32, short_edge, 768 * 1344)
    assert geometry.video_size(*size, short_edge) == (width, height)


class Picture(Image.Image):
    """Records what is asked of it instead of making pixels."""

    def __init__(self, sides):
        super().__init__()
        self.sides, self.resized, self.cut = sides, None, None

    @property
    def size(self):
        return self.sides

    def resize(self, size, resample=None, **options):
        self.resized = Picture(size)
        assert resample == Image.Resampling.LANCZOS
        return self.resized

    def crop(self, box):
        self.cut = box
        return self


@settings(max_examples=100, deadline=None)
@given(sides, st.integers(8, 64).map(lambda n: 32 * n))
def test_reference_images_get_the_sides_that_diffusers_gives_them(size, short_edge):
    pipeline = MiniMaxH3Ref2VASetupStep().init_pipeline()
    pipeline.update_components(reference_image_short_edge=short_edge)
    references = [MiniMaxH3ImageReference(image=Picture(size))]
    (found,) = pipeline(references=references, num_frames=124, output="normalized_references")
    assert geometry.image_size(*size, short_edge) == found.image.size


@settings(max_examples=60, deadline=None)
@given(sides, st.sampled_from([(1344, 768), (768, 1344), (768, 768), (1024, 768), (352, 256)]))
def test_a_second_keyframe_covers_the_canvas_as_in_diffusers(size, canvas):
    assume(size != canvas)
    last = Picture(size)
    MiniMaxH3ResizeStep().init_pipeline()(image=Picture(canvas), last_image=last, width=canvas[0], height=canvas[1])
    found = geometry.keyframe_placement(1, size, canvas, "diffusers")
    assert last.resized.size == found.size
    assert last.resized.cut == (found.left, found.top, found.left + canvas[0], found.top + canvas[1])


@pytest.mark.parametrize(("index", "convention"), [(0, "diffusers"), (0, "vllm-omni"), (1, "vllm-omni")])
def test_other_keyframes_are_stretched(index, convention):
    assert geometry.keyframe_placement(index, (500, 400), (1344, 768), convention) == geometry.Placement((1344, 768))


class Encoder(torch.nn.Module):
    """In the place of the video VAE: keeps the shape of what it is given."""

    config = SimpleNamespace(clip_length=17, latents_mean=[0.0] * 24, latents_std=[1.0] * 24)
    tokens_chunk_size, device = 5, torch.device("cpu")

    def encode(self, pixels, return_dict):
        self.frames = pixels.shape[2]
        return (SimpleNamespace(sample=lambda generator: torch.zeros(1, 24, 1, 1, 1)),)


@settings(max_examples=30, deadline=None)
@given(st.integers(22, 400), st.integers(6, 21).map(lambda n: 17 * n + 5))
def test_the_vae_sees_as_many_frames_as_in_diffusers(available, target):
    encoder = Encoder()
    pipeline = MiniMaxH3Ref2VAReferenceEncoderStep().init_pipeline()
    pipeline.update_components(vae=encoder, audio_vae=encoder)
    # What its setup step leaves: at most the clip's own frames.
    frames = np.zeros((min(available, target), 1, 1, 3), dtype=np.uint8)
    pipeline(normalized_references=[MiniMaxH3VideoReference(frames=frames, fps=24.0)])
    assert geometry.video_frames(available, target, RELEASED.video_vae) == encoder.frames


def test_a_video_too_short_for_the_vae_is_refused():
    with pytest.raises(ValueError, match="21 is below 22"):
        geometry.video_frames(21, 124, RELEASED.video_vae)


@settings(max_examples=100, deadline=None)
@given(st.integers(13, 400))
def test_the_vision_tower_sees_the_frames_that_diffusers_shows_it(frames):
    stack = np.arange(frames)
    theirs, times = MiniMaxH3Ref2VATextEncoderStep._sample_video_condition_frames(stack, 24.0, 2.0, 2)
    assert geometry.conditioner_frames(frames, PROCESSOR) == (theirs, times)
    groups = geometry.frame_groups(theirs, PROCESSOR)
    assert len(groups) == len(times)
    assert [frame for group in groups for frame in group][: len(theirs)] == theirs
    assert groups[-1][-1] == theirs[-1]


def test_a_video_too_short_for_the_vision_tower_is_refused_where_diffusers_refuses_it():
    with pytest.raises(ValueError, match="at least 13 frames"):
        MiniMaxH3Ref2VATextEncoderStep._sample_video_condition_frames(np.arange(12), 24.0, 2.0, 2)
    with pytest.raises(ValueError, match="12 is below 13"):
        geometry.conditioner_frames(12, PROCESSOR)


@settings(max_examples=200, deadline=None)
@given(st.integers(16, 6000), st.integers(16, 6000))
def test_smart_resize_of_images_is_transformers_own(height, width):
    limits = PROCESSOR.image_min_pixels, PROCESSOR.image_max_pixels
    assume(max(height, width) / min(height, width) <= 200)
    assert geometry.smart_resize_image(height, width, PROCESSOR) == their_image_resize(height, width, 32, *limits)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 31), st.integers(16, 3000), st.integers(16, 3000))
def test_smart_resize_of_videos_is_transformers_own(frames, height, width):
    limits = PROCESSOR.video_min_pixels, PROCESSOR.video_max_pixels
    assume(max(height, width) / min(height, width) <= 50)
    theirs = their_video_resize(frames, height, width, 2, 32, *limits)
    assert geometry.smart_resize_video(frames, height, width, PROCESSOR) == theirs


@settings(max_examples=200, deadline=None)
@given(st.integers(32, 4000), st.integers(32, 4000))
def test_image_tokens_are_those_of_transformers_own_processor(height, width):
    assume(max(height, width) / min(height, width) <= 200)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, size={"shortest_edge": PROCESSOR.image_min_pixels, "longest_edge": PROCESSOR.image_max_pixels}
    )
    grid = geometry.image_grid(width, height, PROCESSOR)
    assert math.prod(grid) == processor.get_number_of_image_patches(height, width)
    assert geometry.vision_tokens(grid, PROCESSOR) * 4 == math.prod(grid)


def test_a_released_keyframe_has_1008_vision_tokens():
    grid = geometry.image_grid(1344, 768, PROCESSOR)
    assert grid == (1, 48, 84)
    assert geometry.vision_tokens(grid, PROCESSOR) == 1008


def test_a_video_has_one_group_of_patches_a_second():
    assert geometry.video_grid(124, 1344, 768, PROCESSOR) == (6, 48, 84)


@pytest.mark.parametrize(("height", "width"), [(10, 2001), (2001, 10)])
def test_a_sliver_is_refused(height, width):
    with pytest.raises(ValueError, match="200 times"):
        geometry.smart_resize_image(height, width, PROCESSOR)


def test_one_sampled_frame_is_no_video():
    with pytest.raises(ValueError, match="1 is below 2"):
        geometry.smart_resize_video(1, 256, 256, PROCESSOR)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 30 * 192_000),
    st.sampled_from([8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000, 96000, 192000]),
    st.integers(6, 21).map(lambda n: (17 * n + 5) / 24),
)
def test_a_sound_has_the_samples_that_torchaudio_makes_of_it(samples, rate, seconds):
    cut = min(samples, int(seconds * rate))
    divisor = math.gcd(rate, 32000)
    # torchaudio.functional.resample: torch.as_tensor of a Python float is float32.
    expected = int(torch.ceil(torch.as_tensor(32000 // divisor * cut / (rate // divisor))))
    found = geometry.sound_samples(samples, rate, seconds, RELEASED.audio_vae)
    assert found == (cut if rate == 32000 else expected)
    assert geometry.sound_latents(samples, rate, seconds, RELEASED.audio_vae) == math.ceil(found / 800)
