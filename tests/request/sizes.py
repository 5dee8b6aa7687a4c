"""Dimensions of the released checkpoint and of a miniature, written out so that no checkpoint is needed."""

from __future__ import annotations

from plugins.dimensions import (
    AudioVAEDimensions,
    DenoiserDimensions,
    Dimensions,
    Processor,
    TextEncoderDimensions,
    VideoVAEDimensions,
    VisionDimensions,
)


def _dimensions(hidden: int, heads: int, ffn: int, text: TextEncoderDimensions) -> Dimensions:
    return Dimensions(
        denoiser=DenoiserDimensions(
            hidden=hidden,
            layers=50,
            refiner_layers=2,
            heads=heads,
            head_dim=128,
            ffn=ffn,
            video_channels=24,
            audio_channels=32,
            patch=(1, 2, 2),
            text_dim=text.hidden,
            freq_dim=256,
            time_hidden=hidden,
            time_dim=hidden // 2,
            rope_frequencies=16,
            rope_theta=1e4,
            norm_eps=1e-5,
            qk_norm_eps=1e-5,
            final_norm_eps=1e-6,
        ),
        text_encoder=text,
        vision=VisionDimensions(
            depth=27,
            hidden=1152,
            heads=16,
            intermediate=4304,
            patch=16,
            temporal_patch=2,
            merge=2,
            position_grid=48,
            deepstack=(8, 16, 24),
            out_hidden=text.hidden,
        ),
        processor=Processor(
            image_min_pixels=65536,
            image_max_pixels=16777216,
            video_min_pixels=4096,
            video_max_pixels=25165824,
            patch=16,
            temporal_patch=2,
            merge=2,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            vision_start_id=text.vocab - 284,
            vision_end_id=text.vocab - 283,
            image_pad_id=text.vocab - 281,
            video_pad_id=text.vocab - 280,
        ),
        video_vae=VideoVAEDimensions(latent_channels=24, latents_mean=(0.0,) * 24, latents_std=(1.0,) * 24),
        audio_vae=AudioVAEDimensions(latent_channels=32, latents_mean=(0.0,) * 32, latents_std=(1.0,) * 32),
    )


def _text(hidden: int, heads: int, intermediate: int, vocab: int) -> TextEncoderDimensions:
    return TextEncoderDimensions(
        hidden=hidden,
        layers=50,
        heads=heads,
        kv_heads=max(1, heads // 8),
        head_dim=128,
        intermediate=intermediate,
        vocab=vocab,
        rope_theta=5e6,
        mrope_section=(24, 20, 20),
        rms_eps=1e-6,
    )


RELEASED = _dimensions(5376, 56, 14336, _text(5120, 64, 25600, 151936))
MINIATURE = _dimensions(256, 8, 512, _text(256, 8, 512, 1024))
