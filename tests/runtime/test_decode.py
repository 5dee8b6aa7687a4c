"""Streaming decode against diffusers' video VAE, decode step and video processor."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from diffusers.video_processor import VideoProcessor
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.dimensions import AudioVAEDimensions, VideoVAEDimensions
from runtime.decode import (
    PIXEL_MEAN,
    PIXEL_STD,
    DecodeError,
    VideoPlan,
    decode_audio,
    decode_frames,
    decode_video,
    to_uint8,
)
from runtime.events import Cancellation, Cancelled, Reporter

MEAN = tuple(0.01 * channel for channel in range(24))
STD = tuple(1.0 + 0.05 * channel for channel in range(24))
DIMENSIONS = VideoVAEDimensions(latent_channels=24, latents_mean=MEAN, latents_std=STD)
AUDIO = AudioVAEDimensions(latent_channels=32, latents_mean=(0.0,) * 32, latents_std=(1.0,) * 32)


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    model = AutoencoderKLMiniMaxH3(
        block_out_channels=(32,) * 6,
        layers_per_block=1,
        decoder_num_layers=1,
        decoder_num_attention_heads=1,
        decoder_attention_head_dim=64,
        decoder_ffn_mult=1,
        latents_mean=MEAN,
        latents_std=STD,
    ).eval()
    # A fresh model's attention and feed-forward branches are scaled by zero: each latent would decode on its own,
    # overlaps would be equal from both sides, and no blend could be wrong.
    with torch.no_grad():
        for name, parameter in model.decoder.named_parameters():
            if name.endswith(("scale1", "scale2")):
                parameter.fill_(1.0)
            elif "to_" in name or "register" in name:
                parameter.normal_(0, 0.3)
    return model


def denormalised(latents):
    return latents * torch.tensor(STD).view(1, -1, 1, 1, 1) + torch.tensor(MEAN).view(1, -1, 1, 1, 1)


def tile_decoder(vae):
    @torch.no_grad()
    def decode_tile(latents):
        return vae.decoder(vae.post_quant_conv(denormalised(latents)))

    return decode_tile


def noise_tile(latents):
    """Decoder of the right shape whose output depends on its input and costs nothing."""
    level = latents.mean(dim=1, keepdim=True).repeat_interleave(4, 2).repeat_interleave(16, 3).repeat_interleave(16, 4)
    return torch.cat([level, -level, 2 * level], dim=1)


def latents_of(frames, height, width):
    return torch.randn(1, 24, frames, height // 16, width // 16, generator=torch.Generator().manual_seed(frames))


def reporter(events=None):
    return Reporter((events if events is not None else []).append, lambda: 0.0)


@pytest.mark.parametrize(
    ("frames", "height", "width"), [(7, 256, 256), (17, 256, 256), (12, 512, 256), (12, 320, 288), (7, 256, 480)]
)
def test_frames_match_diffusers_decode(vae, frames, height, width):
    latents = latents_of(frames, height, width)
    with torch.no_grad():
        theirs = vae.decode(denormalised(latents)).sample[0]
    chunks = decode_frames(latents, tile_decoder(vae), DIMENSIONS, reporter(), Cancellation())
    ours = torch.cat([chunk.clone() for chunk in chunks], dim=1)
    assert ours.shape == theirs.shape == (3, (frames - 2) // 5 * 17 + 5, height, width)
    # The same float32 operations in the same order; 1e-5 is room for another order inside a matrix product.
    assert (ours - theirs).abs().max() <= 1e-5


def test_pixels_are_those_of_diffusers_decode_step(vae):
    latents = latents_of(7, 256, 288) * 2
    with torch.no_grad():
        video = vae.decode(denormalised(latents)).sample
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    images = VideoProcessor(vae_scale_factor=16, do_normalize=False).postprocess_video(
        (video * std + mean).clamp(0, 1), output_type="pil"
    )[0]
    theirs = np.stack([np.asarray(image) for image in images])
    ours = torch.cat(list(decode_video(latents, tile_decoder(vae), DIMENSIONS, reporter(), Cancellation())))
    assert ours.dtype == torch.uint8
    assert ours.shape == theirs.shape
    assert np.array_equal(ours.numpy(), theirs)


def test_pixels_round_half_to_even_and_clamp():
    wanted = torch.tensor([0.5, 1.5, 2.5, 254.5, -3.0, 300.0, 17.0])
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    frames = ((wanted.double().view(1, 1, 1, -1) / 255 - mean) / std).float()
    # float32 cannot hold these halves exactly after the inversion: compare with the float32 values that it does hold.
    exact = (frames * std.float() + mean.float()).clamp(0, 1) * 255
    expected = np.rint(exact.numpy()).astype(np.uint8)
    pixels = to_uint8(frames.clone())
    assert np.array_equal(pixels.permute(3, 0, 1, 2).numpy(), expected)
    assert pixels[0, 0, 4:].tolist() == [[0] * 3, [255] * 3, [17] * 3]
    assert np.rint(np.float32([0.5, 1.5, 2.5])).tolist() == [0, 2, 2]


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 3), st.sampled_from([256, 288, 320]), st.sampled_from([256, 352]))
def test_frame_counts_and_reported_tiles_follow_the_plan(chunks, height, width):
    events = []
    latents = latents_of(5 * chunks + 2, height, width)
    sizes = [len(part) for part in decode_video(latents, noise_tile, DIMENSIONS, reporter(events), Cancellation())]
    plan = VideoPlan.of(DIMENSIONS, *latents.shape[2:])
    assert sizes == [17] * chunks + [5]
    assert sum(sizes) == plan.frames
    assert plan.tiles == chunks * (1 if height == 256 else 2) * (1 if width == 256 else 2)
    assert [(event.index, event.total) for event in events] == [(n, plan.tiles) for n in range(plan.tiles + 1)]


def test_released_clip_has_the_tiles_of_the_specification():
    # spec/model.md 6.4: 243 frames at 1344x768 are 14 chunks of 28 tiles.
    plan = VideoPlan.of(DIMENSIONS, 72, 48, 84)
    assert (plan.frames, plan.chunks, plan.tiles) == (243, 14, 392)


def test_frames_are_handed_on_before_the_next_chunk_is_decoded():
    calls = []

    def counting(latents):
        calls.append(None)
        return noise_tile(latents)

    parts = decode_video(latents_of(17, 256, 320), counting, DIMENSIONS, reporter(), Cancellation())
    for chunk in (1, 2, 3):
        assert len(next(parts)) == 17
        assert len(calls) == 2 * chunk
    assert len(next(parts)) == 5
    assert len(calls) == 6


def test_no_decoded_tile_outlives_its_use():
    alive: list[weakref.ref] = []

    def tracked(latents):
        assert sum(reference() is not None for reference in alive) <= 1
        decoded = noise_tile(latents)
        alive.append(weakref.ref(decoded))
        return decoded

    parts = decode_video(latents_of(12, 320, 320), tracked, DIMENSIONS, reporter(), Cancellation())
    assert sum(len(part) for part in parts) == 2 * 17 + 5
    assert len(alive) == 8


def test_a_decoder_may_reuse_the_memory_of_its_output():
    latents = latents_of(12, 320, 288)
    output = torch.empty(1, 3, 28, 256, 256)

    def reusing(tile):
        return output.copy_(noise_tile(tile))

    fresh = torch.cat(list(decode_video(latents, noise_tile, DIMENSIONS, reporter(), Cancellation())))
    reused = torch.cat(list(decode_video(latents, reusing, DIMENSIONS, reporter(), Cancellation())))
    assert torch.equal(fresh, reused)


def test_cancelling_stops_before_the_next_tile():
    cancellation = Cancellation()
    calls = []

    def cancelling(latents):
        calls.append(None)
        if len(calls) == 3:
            cancellation.cancel()
        return noise_tile(latents)

    parts = decode_video(latents_of(12, 320, 320), cancelling, DIMENSIONS, reporter(), cancellation)
    with pytest.raises(Cancelled, match="tile 4 of 8"):
        list(parts)
    assert len(calls) == 3


@pytest.mark.parametrize("frames", [1, 2, 6, 8, 11])
def test_clips_off_the_chunk_grid_are_refused(frames):
    with pytest.raises(DecodeError, match=f"latent_frames: {frames} "):
        list(decode_video(latents_of(frames, 256, 256), noise_tile, DIMENSIONS, reporter(), Cancellation()))


def test_canvases_below_a_tile_and_other_latents_are_refused():
    for latents, message in (
        (latents_of(7, 256, 224), "side below 16 cells"),
        (torch.zeros(1, 16, 7, 16, 16), "24, T, h, w"),
        (torch.zeros(1, 24, 7, 16, 16, dtype=torch.float16), "float32"),
    ):
        with pytest.raises(DecodeError, match=message):
            list(decode_video(latents, noise_tile, DIMENSIONS, reporter(), Cancellation()))


def test_a_decoder_that_returns_nan_or_another_shape_is_refused():
    for broken in (lambda z: noise_tile(z) * float("nan"), lambda z: noise_tile(z)[:, :, :20]):
        with pytest.raises(DecodeError, match="decoder tile"):
            list(decode_video(latents_of(7, 256, 256), broken, DIMENSIONS, reporter(), Cancellation()))


def test_audio_keeps_the_channels_in_order():
    latents = torch.stack([torch.full((32, 9), 0.25), torch.full((32, 9), -0.5)])
    waveform = decode_audio(latents, lambda z: z[:, :1].repeat_interleave(800, 2), AUDIO)
    assert waveform.shape == (2, 7200)
    assert waveform.dtype == torch.float32
    assert waveform.unique(dim=1).tolist() == [[0.25], [-0.5]]


def test_wrong_audio_is_refused():
    good = torch.zeros(2, 32, 9)
    for latents, decode, message in (
        (torch.zeros(1, 32, 9), lambda z: torch.zeros(1, 1, 7200), "audio latents"),
        (good, lambda z: torch.zeros(2, 1, 7100), "waveform"),
        (good, lambda z: torch.full((2, 1, 7200), float("inf")), "waveform"),
    ):
        with pytest.raises(DecodeError, match=message):
            decode_audio(latents, decode, AUDIO)
