"""The miniature is well conditioned and alive: rounding stays small, nothing clips, prompt and seed are heard.

Everything here runs the diffusers and transformers classes on the checkpoint; nothing of this project computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

PROMPT = "A red fox runs through the snow at dawn."
OTHER_PROMPT = "A red fox runs through the snow at dusk."
SIDE = 16  # latent cells of a 256-pixel side
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass
class Latents:
    """Final latents as rows: video [T * 64, 96], audio [2 * A, 32]."""

    video: torch.Tensor
    audio: torch.Tensor

    def distance(self, other: Latents) -> tuple[float, float]:
        return rms(self.video - other.video), rms(self.audio - other.audio)


def rms(values: torch.Tensor) -> float:
    return values.double().square().mean().sqrt().item()


@dataclass
class Reference:
    """The parts of the diffusers pipeline up to the final latents, in float32."""

    tokenizer: AutoTokenizer
    encoder: Qwen3VLForConditionalGeneration
    transformer: MiniMaxH3Transformer3DModel

    def encode(self, prompt: str) -> torch.Tensor:
        ids = torch.tensor([self.tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        return self.encoder.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[50]

    def denoise(self, prompt: str, seed: int, frames: int, audio_latents: int, points: int = 5) -> Latents:
        """Final latents of `frames` latent frames at 256x256 after `points - 1` forwards."""
        text = self.encode(prompt)
        layout = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.ones(text.shape[1], dtype=torch.long), frames, SIDE, SIDE, audio_latents, (1, 2, 2), 2, 2, 0
        )
        fields = dict(zip(FIELDS, layout[:5], strict=True))
        slots = torch.full_like(fields["token_tags"], 3)
        slots[fields["video_indices"]], slots[fields["audio_indices"]] = 0, 1
        generator = torch.Generator().manual_seed(seed)
        video = torch.randn(frames * SIDE * SIDE // 4, 96, generator=generator)
        audio = torch.randn(2 * audio_latents, 32, generator=generator)
        schedules = MiniMaxH3Scheduler(12.0), MiniMaxH3Scheduler(3.0)
        for schedule in schedules:
            schedule.set_timesteps(points)
        for times in zip(*(schedule.timesteps for schedule in schedules), strict=True):
            velocities = self.transformer(
                video[None], audio[None], text, torch.tensor([*times, 0.999, 1.0]), slots, return_dict=False, **fields
            )
            video = schedules[0].step(velocities[0][0], times[0], video, return_dict=False)[0]
            audio = schedules[1].step(velocities[1][0], times[1], audio, return_dict=False)[0]
        return Latents(video, audio)


FIELDS = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")


@pytest.fixture(scope="module", autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def reference(diffusers_root: Path) -> Reference:
    return Reference(
        AutoTokenizer.from_pretrained(diffusers_root / "tokenizer"),
        Qwen3VLForConditionalGeneration.from_pretrained(diffusers_root / "text_encoder", dtype=torch.float32).eval(),
        MiniMaxH3Transformer3DModel.from_pretrained(diffusers_root / "transformer").float().eval(),
    )


@pytest.fixture(scope="module")
def exact_encoder(diffusers_root: Path) -> Qwen3VLForConditionalGeneration:
    """The text encoder in float64."""
    return Qwen3VLForConditionalGeneration.from_pretrained(diffusers_root / "text_encoder", dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def demo(reference: Reference) -> Latents:
    """The demo's request: 107 frames (32 latent frames, 178 audio latents), 4 forwards."""
    return reference.denoise(PROMPT, seed=1, frames=32, audio_latents=178)


def test_a_changed_word_moves_the_final_latents(reference: Reference, demo: Latents) -> None:
    changed = reference.denoise(OTHER_PROMPT, seed=1, frames=32, audio_latents=178)
    assert min(demo.distance(changed)) > 0.1


def test_a_changed_seed_moves_the_final_latents(reference: Reference) -> None:
    one, other = (reference.denoise(PROMPT, seed, frames=7, audio_latents=37) for seed in (1, 2))
    assert min(one.distance(other)) > 0.1


def test_the_partitions_are_different_models(reference: Reference, diffusers_root: Path) -> None:
    second = MiniMaxH3Transformer3DModel.from_pretrained(diffusers_root / "transformer_ref").float().eval()
    other = Reference(reference.tokenizer, reference.encoder, second)
    one, two = (model.denoise(PROMPT, 1, frames=7, audio_latents=37, points=3) for model in (reference, other))
    assert min(one.distance(two)) > 0.1


def test_velocities_stay_bounded_through_49_forwards(reference: Reference) -> None:
    long = reference.denoise(PROMPT, seed=1, frames=2, audio_latents=9, points=50)
    # Noise has RMS 1, and a velocity of RMS about 1 is added over a unit of time.
    assert 0.7 < rms(long.video) < 2
    assert 0.7 < rms(long.audio) < 2


def test_final_latents_do_not_amplify_rounding(
    reference: Reference, exact_encoder: Qwen3VLForConditionalGeneration, diffusers_root: Path
) -> None:
    """Two correct float32 implementations then agree far within the 1e-4 that verification asks for."""
    transformer = MiniMaxH3Transformer3DModel.from_pretrained(diffusers_root / "transformer").double().eval()
    double = Reference(reference.tokenizer, exact_encoder, transformer).denoise(PROMPT, 1, frames=2, audio_latents=9)
    single = reference.denoise(PROMPT, 1, frames=2, audio_latents=9)
    assert (single.video - double.video).abs().max() < 1e-5
    assert (single.audio - double.audio).abs().max() < 1e-5


def test_text_encoder_rounding_stays_small(
    reference: Reference, exact_encoder: Qwen3VLForConditionalGeneration
) -> None:
    exact = Reference(reference.tokenizer, exact_encoder, reference.transformer).encode(PROMPT)
    assert (reference.encode(PROMPT) - exact).abs().max() < 1e-5 * exact.abs().max()


def test_every_text_encoder_layer_matters(reference: Reference) -> None:
    ids = torch.tensor([reference.tokenizer(PROMPT)["input_ids"]])
    states = reference.encoder.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    for before, after in pairwise(states[:51]):
        assert rms(after - before) > 0.05 * rms(before)


def test_few_pixels_are_clipped(diffusers_root: Path, demo: Latents) -> None:
    vae = AutoencoderKLMiniMaxH3.from_pretrained(diffusers_root / "vae").eval()
    grid = demo.video.reshape(32, SIDE // 2, SIDE // 2, 24, 1, 2, 2).permute(3, 0, 4, 1, 5, 2, 6)
    latents = grid.reshape(1, 24, 32, SIDE, SIDE)[:, :, :7]
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    frames = vae.decode(latents * std + mean, return_dict=False)[0]
    pixels = frames * torch.tensor(PIXEL_STD).view(1, 3, 1, 1, 1) + torch.tensor(PIXEL_MEAN).view(1, 3, 1, 1, 1)
    assert ((pixels <= 0) | (pixels >= 1)).double().mean() < 0.01
    assert pixels.std() > 0.05
    assert (pixels[:, :, 1:] - pixels[:, :, :-1]).abs().mean() > 0.01


@pytest.fixture(scope="module")
def audio_latents(diffusers_root: Path, demo: Latents) -> torch.Tensor:
    """The first six tenths of a second of the demo's sound, as raw latents [2, 32, 24]."""
    vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(diffusers_root / "audio_vae")
    mean, std = (torch.tensor(values).view(1, -1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
    return (demo.audio.view(2, 178, 32).transpose(1, 2) * std + mean)[..., :24]


def test_the_sound_is_alive_and_not_clipped(diffusers_root: Path, audio_latents: torch.Tensor) -> None:
    vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(diffusers_root / "audio_vae").eval()
    sound = vae.decode(audio_latents, return_dict=False)[0]
    assert sound.shape == (2, 1, 19_200)
    assert (sound.abs() >= 1).double().mean() < 0.01
    for channel in sound[:, 0]:
        assert rms(channel) > 0.05
        assert abs(channel.mean()) < 0.01
    assert rms(sound[0] - sound[1]) > 0.05


def test_audio_decoder_float32_agrees_with_float64(diffusers_root: Path, audio_latents: torch.Tensor) -> None:
    vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(diffusers_root / "audio_vae").eval()
    single = vae.decode(audio_latents, return_dict=False)[0]
    double = vae.double().decode(audio_latents.double(), return_dict=False)[0]
    assert (single - double).abs().max() <= 1e-5


def test_the_video_encoder_sees_its_input(diffusers_root: Path) -> None:
    vae = AutoencoderKLMiniMaxH3.from_pretrained(diffusers_root / "vae").eval()
    image = torch.randn(1, 3, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    posterior = vae.encode(image, return_dict=False)[0]
    brighter = vae.encode(image + torch.linspace(0, 1, 64), return_dict=False)[0]
    assert 0.1 < rms(posterior.mode()) < 3
    assert rms(posterior.std) < 0.3
    assert rms(posterior.mode() - brighter.mode()) > 0.05


def test_the_audio_encoder_sees_its_input(diffusers_root: Path) -> None:
    vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(diffusers_root / "audio_vae").eval()
    generator = torch.Generator().manual_seed(0)
    latents = vae.encode(0.2 * torch.randn(2, 1, 8000, generator=generator), return_dict=False)[0].mode()
    assert 0.1 < rms(latents) < 5
    assert rms(latents[0] - latents[1]) > 0.1


def test_a_picture_is_heard_by_the_prompt_and_its_colours_differ(
    reference: Reference, exact_encoder: Qwen3VLForConditionalGeneration
) -> None:
    red, blue = _picture((1.0, 0.0, 0.0)), _picture((0.0, 0.0, 1.0))
    one, other = (_shown(reference.encoder, picture) for picture in (red, blue))
    picture, prompt = slice(1, 65), slice(66, None)
    assert rms((one - other)[picture]) > 0.5 * rms(one[picture])
    assert rms((one - other)[prompt]) > 0.5 * rms(one[prompt])
    exact = _shown(exact_encoder, red.double())
    assert (one - exact).abs().max() < 1e-5 * exact.abs().max()


def _picture(colour: tuple[float, float, float]) -> torch.Tensor:
    """A picture of 16x16 patches of one colour, as the processor flattens it."""
    patch = (torch.tensor(colour) * 2 - 1).view(3, 1, 1, 1).expand(3, 2, 16, 16)
    return patch.reshape(1, -1).repeat(256, 1)


def _shown(encoder: Qwen3VLForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """Conditioning of a picture and some tokens after it."""
    start, end, pad = (getattr(encoder.config, f"{n}_token_id") for n in ("vision_start", "vision_end", "image"))
    tokens = torch.tensor([[start, *[pad] * 64, end, *range(20, 40)]])
    states = encoder.model(
        input_ids=tokens,
        pixel_values=pixels,
        image_grid_thw=torch.tensor([[1, 16, 16]]),
        mm_token_type_ids=(tokens == pad).int(),
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states
    return states[50][0]


def test_colours_and_motion_reach_the_normalised_latents_without_saturating(diffusers_root: Path) -> None:
    vae = AutoencoderKLMiniMaxH3.from_pretrained(diffusers_root / "vae").eval()
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    pixel_mean, pixel_std = (torch.tensor(v).view(1, 3, 1, 1, 1) for v in (PIXEL_MEAN, PIXEL_STD))

    def encode(frames: torch.Tensor) -> torch.Tensor:
        return vae.quant_conv(vae.encoder(frames))

    colours = [torch.tensor(c).view(1, 3, 1, 1, 1) for c in ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0))]
    moments = [encode(((c - pixel_mean) / pixel_std).repeat(1, 1, 1, 64, 64)) for c in colours]
    red, blue = ((m[:, :24] - mean) / std for m in moments)
    assert 0.2 < rms(red) < 2
    assert rms(red - blue) > 0.1
    clip = encode(torch.randn(1, 3, 17, 64, 64, generator=torch.Generator().manual_seed(0)))
    for found in (*moments, clip):
        # The posterior clamps log-variances to -30..20.
        assert found[:, 24:].abs().max() < 12
    assert (clip[:, :24, 1:] - clip[:, :24, :-1]).abs().mean() > 0.05


def test_video_encoder_float32_agrees_with_float64(diffusers_root: Path) -> None:
    vae = AutoencoderKLMiniMaxH3.from_pretrained(diffusers_root / "vae").eval()
    frames = torch.randn(1, 3, 5, 48, 48, generator=torch.Generator().manual_seed(0))
    single = vae.quant_conv(vae.encoder(frames))
    vae = vae.double()
    double = vae.quant_conv(vae.encoder(frames.double()))
    assert (single - double).abs().max() < 1e-5 * double.abs().max()


def test_sounds_have_normalised_latents_of_order_one(diffusers_root: Path) -> None:
    vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(diffusers_root / "audio_vae").eval()
    mean, std = (torch.tensor(values).view(1, -1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
    time = torch.arange(8000) / 32_000
    low, high = (0.5 * torch.sin(2 * torch.pi * pitch * time).repeat(2, 1, 1) for pitch in (440, 3000))
    noise = 0.2 * torch.randn(2, 1, 8000, generator=torch.Generator().manual_seed(0))
    latents = [(vae.encode(sound).latent_dist.mode() - mean) / std for sound in (low, high, noise)]
    for one in latents:
        assert 0.3 < rms(one) < 2
    assert min(rms(one - other) for one, other in pairwise(latents)) > 0.1
    exact = vae.double().encode(noise.double()).latent_dist.mode()
    assert ((latents[2] * std + mean) - exact).abs().max() < 1e-4
