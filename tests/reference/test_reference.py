"""The diffusers reference on the miniature: that it is what it says, stage by stage, in either layout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3DenoiseStep
from tokenizers import Tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from export.checkpoint import Checkpoint, materialise
from export.miniature import write_miniature
from h3trt.reference import Reference, ReferencePipeline
from runtime.request import Resolved, resolve

PROMPT = "Wind over café roofs <d>Écoute.</d> 風 and a distant bell"
SEED = 11
FORWARDS = 2
FRAMES, LATENT_FRAMES, AUDIO_LATENTS = 124, 37, 207
"""5 s, the shortest clip that diffusers accepts (spec/model.md 5)."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root = tmp_path_factory.mktemp("reference")
    for layout in ("native", "diffusers"):
        write_miniature(root / layout, layout, seed=2)
    return {layout: Checkpoint.open(root / layout) for layout in ("native", "diffusers")}


@pytest.fixture(scope="module")
def request_(checkpoints: dict[str, Checkpoint]) -> Resolved:
    shape = {"duration": 5, "aspect_ratio": "1:1", "width": 256, "height": 256}
    params = {**shape, "seed": SEED, "num_inference_steps": FORWARDS}
    return resolve(PROMPT, params, checkpoints["native"].dimensions)


@pytest.fixture(scope="module")
def blocks_before() -> list[type]:
    """The denoising loop's blocks as diffusers declares them."""
    return copy.copy(MiniMaxH3DenoiseStep.block_classes)


@pytest.fixture(scope="module")
def pipelines(checkpoints: dict[str, Checkpoint], blocks_before: list[type]) -> Mapping[str, ReferencePipeline]:
    return {layout: ReferencePipeline(one) for layout, one in checkpoints.items()}


@pytest.fixture(scope="module")
def reference(pipelines: Mapping[str, ReferencePipeline], request_: Resolved) -> Reference:
    return pipelines["native"].run(request_)


@pytest.mark.slow
def test_both_layouts_hold_the_same_model(
    pipelines: Mapping[str, ReferencePipeline], reference: Reference, request_: Resolved
) -> None:
    other = pipelines["diffusers"].run(request_, decode=False)
    for name in ("text", "video_latents", "audio_latents"):
        assert torch.equal(getattr(reference, name), getattr(other, name)), name
    # What decodes them takes half a minute of a test, and is the same if its weights are.
    for name in ("vae", "audio_vae"):
        native, diffusers = (pipelines[layout]._components[name].state_dict() for layout in ("native", "diffusers"))
        assert native.keys() == diffusers.keys()
        assert all(torch.equal(native[key], diffusers[key]) for key in native), name


@pytest.mark.slow
def test_the_prompt_is_encoded_verbatim_up_to_the_fiftieth_layer(
    reference: Reference, checkpoints: dict[str, Checkpoint]
) -> None:
    one = checkpoints["diffusers"]
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**one.config("text_encoder")))
    model.load_state_dict({n: materialise(w).float() for n, w in one.parameters("text_encoder").items()})
    ids = Tokenizer.from_file(str(one.tokenizer_file)).encode(PROMPT, add_special_tokens=False).ids
    with torch.no_grad():
        states = model.eval().model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    torch.testing.assert_close(reference.text, states[50][0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_are_text_then_audio_then_video(reference: Reference) -> None:
    text, audio, video = len(reference.text), 2 * AUDIO_LATENTS, LATENT_FRAMES * 8 * 8
    assert reference.token_tags.tolist() == [1] * text + [2] * audio + [0] * video
    assert reference.text_indices.tolist() == list(range(text))
    assert reference.audio_indices.tolist() == list(range(text, text + audio))
    assert reference.video_indices.tolist() == list(range(text + audio, text + audio + video))
    assert reference.position_ids.shape == (text + audio + video, 3)


@pytest.mark.slow
def test_noise_is_drawn_from_the_seed_video_first(reference: Reference) -> None:
    generator = torch.Generator().manual_seed(SEED)
    video = torch.randn(1, 24, LATENT_FRAMES, 16, 16, generator=generator)
    audio = torch.randn(2 * AUDIO_LATENTS, 32, generator=generator)
    patches = video.view(24, LATENT_FRAMES, 8, 2, 8, 2).permute(1, 2, 4, 0, 3, 5).reshape(-1, 96)
    assert torch.equal(reference.noise.video, patches)
    assert torch.equal(reference.noise.audio, audio)


@pytest.mark.slow
def test_every_step_is_recorded_and_the_last_is_the_result(reference: Reference) -> None:
    assert len(reference.steps) == FORWARDS
    states = [reference.noise, *reference.steps]
    moved = [(after.video - before.video).abs().mean() for before, after in pairwise(states)]
    assert min(moved) > 0.01
    last = reference.steps[-1]
    assert torch.equal(reference.audio_latents, last.audio.view(2, AUDIO_LATENTS, 32).transpose(1, 2))
    patches = last.video.view(LATENT_FRAMES, 8, 8, 24, 2, 2).permute(3, 0, 1, 4, 2, 5)
    assert torch.equal(reference.video_latents, patches.reshape(1, 24, LATENT_FRAMES, 16, 16))


@pytest.mark.slow
def test_media_are_the_decoded_result(reference: Reference, checkpoints: dict[str, Checkpoint]) -> None:
    one = checkpoints["diffusers"]
    video_vae: Any = AutoencoderKLMiniMaxH3(**one.config("video_vae"))
    audio_vae: Any = AutoencoderKLMiniMaxH3Audio(**one.config("audio_vae"))
    for component, vae in (("video_vae", video_vae), ("audio_vae", audio_vae)):
        vae.load_state_dict({n: materialise(w) for n, w in one.parameters(component).items()})  # type: ignore[arg-type]
    with torch.no_grad():
        frames = video_vae.decode(_denormalised(reference.video_latents, video_vae)).sample[0]
        sound = audio_vae.decode(_denormalised(reference.audio_latents, audio_vae)).sample[:, 0]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (frames.permute(1, 2, 3, 0) * std + mean).clamp(0, 1).mul(255).round().to(torch.uint8)
    assert reference.media is not None
    assert reference.media.frames.shape == (FRAMES, 256, 256, 3)
    # A product and a sum in another order may round a half to its other neighbour.
    assert (reference.media.frames.int() - pixels.int()).abs().max() <= 1
    assert (reference.media.frames != pixels).float().mean() < 1e-3
    torch.testing.assert_close(reference.media.waveform, sound, rtol=0, atol=1e-6)


def _denormalised(latents: torch.Tensor, vae: Any) -> torch.Tensor:
    shape = (1, -1, *[1] * (latents.ndim - 2))
    mean, std = (torch.tensor(getattr(vae.config, f"latents_{name}")).view(shape) for name in ("mean", "std"))
    return latents * std + mean


@pytest.mark.slow
def test_diffusers_itself_is_left_as_it_was(reference: Reference, blocks_before: list[type]) -> None:
    assert MiniMaxH3DenoiseStep.block_classes == blocks_before
    assert list(MiniMaxH3DenoiseStep().sub_blocks) == ["denoiser", "update"]
