"""The conventions of vllm-omni, where they are selected, against its own code."""

from __future__ import annotations

import functools
import math
import operator
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from export.miniature.tokenizer import train
from plugins.schedule import Schedule
from plugins.shape import canvas_of, ratio_of
from runtime import geometry, packing
from runtime.packing import Condition, patchify_video
from runtime.presentation import presentation
from runtime.rng import augmented, draw_noise
from runtime.selection import packed_order
from runtime.text import Tokenizer
from tests.request.sizes import RELEASED

FIRST, LAST = (Condition("image", role, 1, 16, 20) for role in ("first", "last"))
IMAGE = Condition("image", "reference", 1, 24, 16)
SQUARE = Condition("image", "reference", 1, 16, 16)
SILENT = Condition("video", "reference", 32, 20, 16)
SOUNDING = Condition("video", "reference", 42, 20, 16, 178)
LONG_SOUND = Condition("video", "reference", 17, 16, 28, 480)
SOUND = Condition("audio", "reference", audio_latents=113)
CASES = {
    "text only": (),
    "first keyframe": (FIRST,),
    "last keyframe": (LAST,),
    "both keyframes": (FIRST, LAST),
    "one image": (IMAGE,),
    "two images": (IMAGE, SQUARE),
    "silent video": (SILENT,),
    "video with sound": (SOUNDING,),
    "image and sound": (IMAGE, SOUND),
    "everything": (IMAGE, SQUARE, IMAGE, SOUNDING, LONG_SOUND, SOUND),
}
CLIP, FRAMES, AUDIO_LATENTS = (37, 16, 20), 124, 207
SHIFTS = 12.0, 3.0

even = st.integers(8, 12).map(lambda n: 2 * n)
images = st.builds(lambda height, width: Condition("image", "reference", 1, height, width), even, even)
videos = st.builds(
    lambda frames, height, width, sound: Condition("video", "reference", 5 * frames + 2, height, width, sound),
    st.integers(1, 10),
    even,
    even,
    st.just(0) | st.integers(80, 600),
)
sounds = st.builds(lambda latents: Condition("audio", "reference", audio_latents=latents), st.integers(80, 600))
references = st.lists(st.one_of(images, videos, sounds), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def plain_sum(theirs, monkeypatch):
    """The peer means a sequential sum and calls `sum`, which compensates from Python 3.12 on."""
    if sys.version_info >= (3, 12):
        sequential = functools.partial(functools.reduce, operator.add)
        monkeypatch.setattr(theirs.packed_sequence, "sum", sequential, raising=False)


def grid(condition):
    return condition.latent_frames, condition.latent_height, condition.latent_width


def video_rows(conditions):
    return sum(math.prod(grid(condition)) // 4 for condition in conditions)


def block(condition):
    """A reference in the peer's words."""
    kind = "video_audio" if condition.kind == "video" and condition.audio_latents else condition.kind
    shape = {
        "latent_t": condition.latent_frames,
        "latent_h": condition.latent_height,
        "latent_w": condition.latent_width,
    }
    return {"kind": kind, "ref_audio_t": condition.audio_latents, **shape}


def state(theirs, conditions, tags, seed, clean, sound):
    """What the peer's sampler starts from."""
    pipeline = theirs.pipeline_minimax_h3.MiniMaxH3Pipeline
    roles = [condition.role for condition in conditions]
    task = "t2va" if not conditions else "ref2va" if "reference" in roles else "fl2va"
    draw = functools.partial(pipeline._initial_noise, None)
    itself = SimpleNamespace(device=torch.device("cpu"), _initial_noise=draw)
    return pipeline._build_denoise_inputs(
        itself,
        task=task,
        text_embeddings=torch.zeros(len(tags), 8),
        text_tags=tags,
        seed=seed,
        latent_t=CLIP[0],
        latent_h=CLIP[1],
        latent_w=CLIP[2],
        audio_t=AUDIO_LATENTS,
        num_frames=FRAMES,
        num_steps=12,
        video_shift=SHIFTS[0],
        audio_shift=SHIFTS[1],
        base_schedule=None,
        visual_condition=clean if len(clean) else None,
        visual_condition_shape=None,
        audio_condition=sound if len(sound) else None,
        ref_audio_t=None,
        ref_blocks=[block(condition) for condition in conditions],
        visual_condition_shapes=[grid(each) for each in conditions if each.latent_frames],
        audio_condition_lengths=[each.audio_latents for each in conditions if each.audio_latents],
        keyframe_frame_indices=[{"first": 0, "last": -1}[role] for role in roles if role != "reference"] or None,
    )


def assert_equal_state(theirs, conditions, seed):
    tags = torch.ones(70, dtype=torch.long)
    tags[6:40] = 0
    generator = torch.Generator().manual_seed(9)
    clean = torch.randn(video_rows(conditions), 96, generator=generator)
    sound = torch.randn(2 * sum(each.audio_latents for each in conditions), 32, generator=generator)
    found = state(theirs, conditions, tags, seed, clean, sound)
    branch = found["branch"]
    layout = packing.layout(tags, conditions, *CLIP, AUDIO_LATENTS)

    rows = layout.rows
    assert branch.used_len == rows
    assert torch.equal(layout.position_ids, branch.img_position_ids_dev[:rows])
    assert torch.equal(layout.token_tags, branch.token_tags_dev[:rows])
    assert torch.equal(layout.video_indices, branch.img_pos)
    assert torch.equal(layout.audio_indices, branch.audio_pos)
    assert layout.condition_video == (~branch.update_mask).sum()
    assert layout.condition_audio == (~branch.audio_update_mask).sum()
    assert_equal_timesteps(layout, branch, found)

    grids = [grid(each) for each in conditions if each.latent_frames]
    noise = draw_noise(seed, "vllm-omni", grids, CLIP, AUDIO_LATENTS, (24, 32))
    assert torch.equal(patchify_video(noise.video), found["video_rows"][branch.update_mask])
    assert torch.equal(noise.audio_rows, found["audio_rows"][branch.audio_update_mask])
    if len(clean):
        assert torch.equal(augmented(clean, noise), found["cond_anchor"])
    if len(sound):
        assert torch.equal(sound, found["audio_anchor"])


def assert_equal_timesteps(layout, branch, found):
    slots = Schedule.uniform(12, *SHIFTS).slots()
    for step, slot in enumerate(slots):
        # As the peer's loop calls it, from the sigmas that it makes itself.
        t_video, t_audio = 1.0 - found["sigmas_video"][step], 1.0 - found["sigmas_audio"][step]
        timesteps = torch.zeros(branch.seq_len)
        branch.fill_timesteps(
            timesteps,
            t_video=t_video,
            t_audio=t_audio,
            imgvid_cond_timestep=max(t_video, 0.999),
            audio_ref_cond_timestep=max(t_audio, 1.0),
        )
        assert torch.equal(slot[layout.timestep_index], timesteps[: layout.rows])


@pytest.mark.parametrize("conditions", CASES.values(), ids=CASES)
def test_layout_noise_and_timesteps_are_the_peers(theirs, conditions):
    assert_equal_state(theirs, conditions, 7)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conditions=references, seed=st.integers(0, 2**31))
def test_any_references_by_type_have_the_peers_layout_noise_and_timesteps(theirs, conditions, seed):
    order = packed_order([each.kind for each in conditions], "by_type")
    assert_equal_state(theirs, [conditions[place] for place in order], seed)


class Codec:
    """In the place of the peer's VAEs: rows of zeros, of the size that latents would have."""

    def encode_image(self, image):
        return torch.zeros(image.width // 32 * image.height // 32, 96)

    def encode_video(self, frames):
        shape = (5 * (len(frames) // 17) + 2, frames.shape[1] // 16, frames.shape[2] // 16)
        return torch.zeros(shape[0] * shape[1] * shape[2] // 4, 96), shape

    def encode_waveform(self, waveform, rate):
        latents = geometry.sound_latents(waveform.shape[-1], rate, 15.0, RELEASED.audio_vae)
        return torch.zeros(2 * latents, 32), latents


def prepared(theirs, monkeypatch, task, pictures, films, sounds, **extra):
    """The peer's own preparation of a request; its videos are decoded here and not by ffmpeg."""
    module = theirs.encoder_processing

    def prepare_reference_videos(videos, **_):
        return [{"prepared_path": i, "original_path": i, "input_has_audio": films[i][1]} for i in range(len(videos))]

    monkeypatch.setattr(module, "prepare_reference_videos", prepare_reference_videos)
    monkeypatch.setattr(module, "load_video_frames", lambda index: films[index][0])
    monkeypatch.setattr(module, "load_video_audio", lambda *_, **__: (torch.zeros(2, 3 * 44_100), 44_100))
    media = {"image": pictures, "video": [str(index) for index in range(len(films))], "audio": sounds}
    sampling = SimpleNamespace(fps=24, height=None, width=None, num_frames=124, extra_args=extra)
    prompt = {"prompt": "a cat", "multi_modal_data": {name: values or None for name, values in media.items()}}
    return module.prepare_encoder_inputs(prompt, sampling, task=task)


def test_by_type_is_the_order_that_the_peer_packs_references_in(theirs, monkeypatch):
    pictures = [Image.new("RGB", (256, 300)), Image.new("RGB", (300, 256))]
    films = [(np.zeros((56, 64, 96, 3), np.uint8), True), (np.zeros((73, 96, 64, 3), np.uint8), False)]
    sounds = [(torch.zeros(2, 90_000), 32_000), (torch.zeros(1, 64_000), 32_000)]
    ready = prepared(theirs, monkeypatch, "ref2va", pictures, films, sounds)
    codec = Codec()
    encoded = theirs.encoder_processing.encode_media(
        ready.media, video_vae=codec, audio_vae=codec, emit_conditioning=True
    )
    kinds = ["audio", "video", "image", "audio", "image", "video"]
    order = packed_order(kinds, "by_type")
    packed = [found["kind"].removesuffix("_audio") for found in encoded.ref_blocks]
    assert packed == [kinds[place] for place in order]
    # Labels: that of a video's sound comes before the video's own, and counts with those of sounds alone.
    names = [("image", 1), ("image", 2), ("audio", 1), ("video", 1), ("video", 2), ("audio", 2), ("audio", 3)]
    assert ready.condition_labels == names
    assert [image.size for image in ready.images] == [geometry.image_size(*each.size, 2048) for each in pictures]
    assert ready.video_timestamps == [
        geometry.conditioner_frames(len(film), RELEASED.processor)[1] for film, _ in films
    ]


def test_the_presentation_by_type_is_the_peers(theirs, monkeypatch, tmp_path):
    from transformers import Qwen2Tokenizer

    files = train()
    (tmp_path / "tokenizer.json").write_text(files.files()["tokenizer.json"], encoding="utf-8")
    tokens = ("vision_start", "vision_end", "image_pad", "video_pad")
    processor = RELEASED.processor.model_copy(
        update={f"{name}_id": files.special_ids[f"<|{name}|>"] for name in tokens}
    )
    references = [
        SimpleNamespace(kind="image", frames=1, vision_grid=(1, 16, 18), audio_latents=0),
        SimpleNamespace(kind="video", frames=56, vision_grid=(3, 4, 6), audio_latents=93),
        SimpleNamespace(kind="video", frames=73, vision_grid=(4, 6, 4), audio_latents=0),
        SimpleNamespace(kind="audio", frames=0, vision_grid=(0, 0, 0), audio_latents=80),
    ]
    ids, tags = theirs.preprocessing.build_minimax_h3_presentation(
        Qwen2Tokenizer(tokenizer_file=str(tmp_path / "tokenizer.json")),
        prompt="a cat",
        task="ref2va",
        condition_labels=[("image", 1), ("audio", 1), ("video", 1), ("video", 2), ("audio", 2)],
        image_grid_thw=torch.tensor([[1, 16, 18]]),
        video_grid_thw=torch.tensor([[3, 4, 6], [4, 6, 4]]),
        video_timestamps=[geometry.conditioner_frames(frames, processor)[1] for frames in (56, 73)],
        merge_size=2,
    )
    found = presentation("a cat", references, Tokenizer(tmp_path / "tokenizer.json"), processor)
    assert found.token_ids.tolist() == ids.tolist()
    assert found.tags.tolist() == tags.tolist()


def test_keyframes_are_stretched_as_by_the_peer(theirs, monkeypatch):
    pictures = [Image.effect_noise((512, 300), 90).convert("RGB"), Image.effect_noise((300, 400), 90).convert("RGB")]
    ready = prepared(theirs, monkeypatch, "fl2va", pictures, [], [])
    canvas = canvas_of(ratio_of("512:300"))
    for index, (picture, found) in enumerate(zip(pictures, ready.images, strict=True)):
        placement = geometry.keyframe_placement(index, picture.size, canvas, "vllm-omni")
        assert (placement.left, placement.top) == (0, 0)
        assert found.tobytes() == picture.resize(placement.size, Image.Resampling.LANCZOS).tobytes()


sides = st.tuples(st.integers(256, 5760), st.integers(256, 5760)).filter(lambda size: 0.4 <= size[0] / size[1] <= 2.5)


@settings(max_examples=200, deadline=None)
@given(size=sides)
def test_pictures_and_videos_have_the_peers_sizes(theirs, size):
    height, width = theirs.preprocessing.resolve_minimax_h3_output_canvas(size[0] / size[1], 768)
    assert canvas_of(ratio_of("{}:{}".format(*size))) == (width, height)
    assert geometry.video_size(*size, 768) == theirs.reference_video._reference_video_shape(*size)
    shape = theirs.preprocessing.resolve_minimax_h3_reference_image_shape(SimpleNamespace(size=size))
    assert geometry.image_size(*size, 2048) == shape


@settings(max_examples=50, deadline=None)
@given(frames=st.integers(13, 362))
def test_the_vision_tower_sees_the_frames_that_it_sees_of_the_peer(theirs, frames):
    numbered = np.arange(frames, dtype=np.int64)[:, None, None, None].repeat(3, axis=-1)
    found = theirs.reference_video.sample_reference_video_frames("", decoded_frames=numbered)
    indices, times = geometry.conditioner_frames(frames, RELEASED.processor)
    assert [int(frame.flat[0]) for frame in found["frames"]] == indices
    assert found["block_timestamps"] == times
