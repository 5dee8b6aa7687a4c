"""Conditions from pixels and sound, against diffusers' own encoding with the same autoencoders."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition

from export.checkpoint import Checkpoint, materialise
from export.miniature import write_miniature
from plugins.dimensions import Dimensions
from runtime.conditioning import (
    ConditionError,
    EncodeTile,
    condition_latents,
    condition_sound,
    encoder_tiles,
    sample_posterior,
    video_moments,
)
from runtime.events import Cancellation, Cancelled, Event, Reporter, Units
from runtime.request import CONDITION_SEED

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SIZES = [(1, 256, 256), (1, 384, 640), (22, 256, 256)]
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
def video_vae(dimensions: Dimensions) -> AutoencoderKLMiniMaxH3:
    """A quarter of the miniature's channels: 17 frames of it would take ten seconds."""
    torch.manual_seed(5)
    vae = dimensions.video_vae
    model = AutoencoderKLMiniMaxH3(
        block_out_channels=(8, 8, 8, 8, 8, 16),
        norm_num_groups=8,
        layers_per_block=1,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        latents_mean=vae.latents_mean,
        latents_std=vae.latents_std,
    )
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


@pytest.fixture(scope="module")
def encode_tile(video_vae: AutoencoderKLMiniMaxH3) -> EncodeTile:
    return lambda frames: video_vae.quant_conv(video_vae.encoder(frames))


@pytest.mark.parametrize(("frames", "height", "width"), SIZES)
def test_latents_are_those_of_diffusers(
    frames: int,
    height: int,
    width: int,
    video_vae: AutoencoderKLMiniMaxH3,
    encode_tile: EncodeTile,
    dimensions: Dimensions,
) -> None:
    """The same convolutions on the same tiles: what is around them (colours, tiles, clips, sample) is exact."""
    pixels, events = video(frames, height, width), list[Event]()
    tiles = encoder_tiles(frames, height, width, dimensions.video_vae)
    found = condition_latents(iter(pixels), encode_tile, dimensions.video_vae, units(tiles, events), CONDITION_SEED)
    expected = encode_vae_condition(video_vae, pixels.permute(3, 0, 1, 2)[None], MEAN, STD)
    assert torch.equal(found, expected)
    assert found.shape[2] == (1 if frames == 1 else (frames - 5) // 17 * 5 + 2)
    assert [event.index for event in events] == list(range(tiles + 1))


def flat_tile(frames: torch.Tensor) -> torch.Tensor:
    """A stand-in encoder: the mean colour of each cell of a tile in the first channels, no variance."""
    latent_frames = 1 if frames.shape[2] == 1 else 5
    cells = torch.nn.functional.adaptive_avg_pool3d(frames, (latent_frames, 16, 16))
    return torch.cat([cells, torch.zeros(1, 21, *cells.shape[2:]), torch.full((1, 24, *cells.shape[2:]), -30.0)], dim=1)


@pytest.mark.parametrize("frames", [2, 16, 17, 18, 34, 35, 124])
def test_frames_are_taken_clip_by_clip_and_never_all_held(frames: int, dimensions: Dimensions) -> None:
    """Weak references say which of the frames that were handed over are still alive when each tile is encoded."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def stream() -> Iterator[torch.Tensor]:
        for _ in range(frames):
            frame = torch.zeros(256, 256, 3, dtype=torch.uint8)
            made.append(weakref.ref(frame))
            yield frame

    def encode(tile: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in made))
        return flat_tile(tile)

    clips = math.ceil(frames / 17)
    moments = video_moments(stream(), encode, dimensions.video_vae, units(clips))
    assert moments.shape == (1, 48, 5 * clips - 3, 16, 16)
    assert len(alive) == clips
    assert max(alive) <= 17


def test_a_short_last_clip_repeats_its_last_frame(dimensions: Dimensions) -> None:
    pixels = video(20, 256, 256)
    filled = torch.cat([pixels, pixels[-1:].expand(14, -1, -1, -1)])
    short, full = (video_moments(iter(x), flat_tile, dimensions.video_vae, units(2)) for x in (pixels, filled))
    assert torch.equal(short, full)


def test_the_posterior_is_sampled_with_the_fixed_seed() -> None:
    moments = 3 * torch.randn(1, 48, 2, 16, 16)
    moments[:, 24:, 0, 0] = torch.tensor([-100.0, 100.0] * 8)
    expected = DiagonalGaussianDistribution(moments).sample(torch.Generator().manual_seed(42))
    assert torch.equal(sample_posterior(moments, 42), expected)
    assert not torch.equal(sample_posterior(moments, 43), expected)


@pytest.mark.parametrize("samples", [800, 801, 4000, 64123])
def test_sound_rows_are_those_of_diffusers(
    samples: int, audio_vae: AutoencoderKLMiniMaxH3Audio, dimensions: Dimensions
) -> None:
    waveform = 0.3 * torch.randn(2, samples)

    def encode(padded: torch.Tensor) -> torch.Tensor:
        assert padded.shape[-1] % 800 == 0
        return audio_vae.encode(padded).latent_dist.mode()

    found = condition_sound(waveform, encode, dimensions.audio_vae)
    # As MiniMaxH3Ref2VAReferenceEncoderStep does it.
    mean, std = (torch.tensor(getattr(audio_vae.config, f"latents_{name}")).view(1, 1, -1) for name in ("mean", "std"))
    latents = audio_vae.encode(waveform[:, None], return_dict=False)[0].mode().float().cpu().transpose(1, 2)
    assert torch.equal(found, ((latents - mean) / std).reshape(-1, 32))
    assert len(found) == 2 * math.ceil(samples / 800)


def test_a_cancelled_request_encodes_no_further_tile(dimensions: Dimensions) -> None:
    cancellation, tiles = Cancellation(), []

    def encode(tile: torch.Tensor) -> torch.Tensor:
        tiles.append(tile)
        cancellation.cancel()
        return flat_tile(tile)

    with pytest.raises(Cancelled, match="encoder tile 1, 2"):
        condition_latents(
            iter(video(1, 256, 416)), encode, dimensions.video_vae, units(2, cancellation=cancellation), CONDITION_SEED
        )
    assert len(tiles) == 1


@pytest.mark.parametrize(
    ("frames", "encode", "message"),
    [
        (video(1, 256, 256)[:0], flat_tile, "at least one"),
        (video(1, 224, 256), flat_tile, "224 x 256 has a side below 256"),
        (video(1, 256, 256), lambda tile: flat_tile(tile)[:, :47], "encoder tile"),
        (video(1, 256, 256), lambda tile: flat_tile(tile) * float("nan"), "finite"),
    ],
)
def test_what_cannot_be_a_condition_is_refused(
    frames: torch.Tensor, encode: EncodeTile, message: str, dimensions: Dimensions
) -> None:
    with pytest.raises(ConditionError, match=message):
        condition_latents(iter(frames), encode, dimensions.video_vae, units(1), CONDITION_SEED)


def test_a_soundtrack_of_no_samples_or_not_stereo_is_refused(dimensions: Dimensions) -> None:
    for waveform in (torch.zeros(2, 0), torch.zeros(1, 800), torch.zeros(800)):
        with pytest.raises(ConditionError, match="waveform"):
            condition_sound(waveform, lambda x: x, dimensions.audio_vae)
