"""The video autoencoder: configuration, tensors and native names (spec/model.md 1e)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from export.checkpoint.components.configuration import (
    Configuration,
    Layers,
    Translation,
    require,
    same_length,
    take_size,
    take_sizes,
    translate,
)
from export.checkpoint.recipes import Projection, Recipe, Swapped, Whole
from export.checkpoint.safetensors_file import Declared
from export.checkpoint.strict_json import section
from plugins.dimensions import VideoVAEDimensions

F32 = torch.float32


class VideoVAEConfig(Configuration):
    """Constructor arguments of `diffusers.AutoencoderKLMiniMaxH3`; the defaults are the release."""

    in_channels: PositiveInt = 3
    out_channels: PositiveInt = 3
    latent_channels: PositiveInt = 24
    block_out_channels: tuple[PositiveInt, ...] = (128, 256, 256, 512, 512, 1024)
    layers_per_block: Layers = 2
    spatial_downsample_factors: tuple[PositiveInt, ...] = (2, 2, 2, 2, 1, 1)
    temporal_downsample_factors: tuple[PositiveInt, ...] = (1, 2, 2, 1, 1, 1)
    norm_num_groups: PositiveInt = 32
    norm_eps: PositiveFloat = 1e-6
    spatial_padding_mode: str = "reflect"
    decoder_num_layers: Layers = 36
    decoder_num_attention_heads: PositiveInt = 32
    decoder_attention_head_dim: PositiveInt = 64
    decoder_num_register_tokens: NonNegativeInt = 4
    decoder_ffn_mult: PositiveInt = 4
    decoder_rope_theta: PositiveFloat = 100.0
    decoder_rope_dim_ratio: PositiveFloat = 0.75
    decoder_norm_eps: PositiveFloat = 1e-5
    clip_length: PositiveInt = 17
    token_drop: NonNegativeInt = 3
    latents_mean: tuple[FiniteFloat, ...]
    latents_std: tuple[PositiveFloat, ...]

    @field_validator("spatial_downsample_factors", "temporal_downsample_factors")
    @classmethod
    def _one_for_each_level(cls, values: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        return same_length(values, info, "block_out_channels")

    @field_validator("latents_mean", "latents_std")
    @classmethod
    def _one_for_each_channel(cls, values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        return same_length(values, info, "latent_channels")


_FIXED_SOURCE: Mapping[str, Any] = {
    "use_vit_decoder": True,
    "use_t_isolated_gn": True,
    "causal_encoder": True,
    "causal_decoder": False,
    "pixel_norm_type": "imagenet",
}
"""Native source/config.json values that select the architecture; no other is built."""

_FIXED_DECODER: Mapping[str, Any] = {
    "ffn_activation_fn": "silu",
    "ffn_use_gated": True,
    "norm_type": "rms_norm",
    "norm_affine": True,
    "qk_norm_type": "rms_norm",
    "qk_norm_affine": False,
}


_SOURCE_KEYS: Mapping[str, str] = {
    "latent_channels": "z_channels",
    "layers_per_block": "num_res_blocks",
    "spatial_downsample_factors": "space_down",
    "temporal_downsample_factors": "time_down",
    "spatial_padding_mode": "padding_mode",
}
_DECODER_KEYS: Mapping[str, str] = {
    "decoder_num_layers": "num_layers",
    "decoder_num_attention_heads": "heads",
    "decoder_attention_head_dim": "dim_head",
    "decoder_rope_theta": "rope_theta",
    "decoder_rope_dim_ratio": "rope_dim_ratio",
}
_OUTER_KEYS: Mapping[str, str] = {
    "clip_length": "vae_clip_length",
    "token_drop": "vae_token_drop",
    "latents_mean": "latents_mean",
    "latents_std": "latents_std",
}


def from_native(outer: dict[str, Any], outer_file: Path, source: dict[str, Any], file: Path) -> Translation:
    """Constructor arguments from the native config.json (`outer`) and source/config.json (`source`).

    Raises:
        CheckpointError: a key is absent, or selects an architecture that H3 does not have.
    """
    for key, value in _FIXED_SOURCE.items():
        require(source, key, value, file)
    decoder = section(source, "vit_decoder_kwargs", file)
    for key, value in _FIXED_DECODER.items():
        require(decoder, key, value, file)
    width = take_size(source, "ch", file)
    levels = [width * factor for factor in take_sizes(source, "ch_mult", file)]
    return (
        Translation({"block_out_channels": levels}, {"block_out_channels": (file, "ch_mult")})
        | translate(_SOURCE_KEYS, source, file)
        | translate(_DECODER_KEYS, decoder, file, "vit_decoder_kwargs.")
        | translate(_OUTER_KEYS, outer, outer_file)
    )


def to_native(config: VideoVAEConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The native config.json and source/config.json that describe the same model."""
    outer = {
        "_class_name": "MiniMaxH3VideoVAE",
        "mode": "standalone",
        "auto_map": {"AutoModel": "minimax_h3_video_vae.MiniMaxH3VideoVAE"},
        "source_path": "source",
        "source_class_name": "AutoencoderKLLegacy",
        "source_safetensors_path": "model.safetensors",
        "vae_clip_length": config.clip_length,
        "vae_token_drop": config.token_drop,
        "vae_encoder_tiling": 1,
        "vae_decoder_tiling": 1,
        "vae_parallel_tiling": 1,
        "vae_tile_size": 256,
        "vae_tile_overlap_min": 64,
        "vae_encoder_parallel": 0,
        "vae_decoder_parallel": 0,
        "vae_chunk_dim": -1,
        "latent_channels": config.latent_channels,
        "latents_mean": list(config.latents_mean),
        "latents_std": list(config.latents_std),
    }
    return outer, _native_source(config)


def _native_source(config: VideoVAEConfig) -> dict[str, Any]:
    width = config.block_out_channels[0]
    return {
        **_FIXED_SOURCE,
        "in_channels": config.in_channels,
        "out_ch": config.out_channels,
        "ch": width,
        "ch_mult": [channels // width for channels in config.block_out_channels],
        "num_res_blocks": config.layers_per_block,
        "space_down": list(config.spatial_downsample_factors),
        "time_down": list(config.temporal_downsample_factors),
        "padding_mode": config.spatial_padding_mode,
        "embed_dim": config.latent_channels,
        "z_channels": config.latent_channels,
        "vae_ratio": prod(config.spatial_downsample_factors),
        "vae_ratio_t": prod(config.temporal_downsample_factors),
        "scaling": 1,
        "shift": 0,
        "vit_decoder_kwargs": {
            **_FIXED_DECODER,
            "dim_head": config.decoder_attention_head_dim,
            "heads": config.decoder_num_attention_heads,
            "num_layers": config.decoder_num_layers,
            "rope_dim_ratio": config.decoder_rope_dim_ratio,
            "rope_theta": config.decoder_rope_theta,
        },
    }


def dimensions(config: VideoVAEConfig) -> VideoVAEDimensions:
    """The sizes that the rest of the compiler reads. Tiles are 256 pixels with 64 of overlap, as released."""
    ratio = prod(config.temporal_downsample_factors)
    return VideoVAEDimensions(
        latent_channels=config.latent_channels,
        latents_mean=config.latents_mean,
        latents_std=config.latents_std,
        spatial_ratio=prod(config.spatial_downsample_factors),
        temporal_ratio=ratio,
        clip_frames=config.clip_length,
        clip_latents=-(-config.clip_length // ratio),
        token_drop=config.token_drop,
    )


def tensors(config: VideoVAEConfig) -> dict[str, Declared]:
    """Every parameter by its diffusers name, all float32."""
    latent = config.latent_channels
    shapes = {
        **_encoder(config),
        **_conv("quant_conv", 2 * latent, 2 * latent, 1),
        **_conv("post_quant_conv", latent, latent, 1),
        **_decoder(config),
    }
    return {name: Declared(shape, F32) for name, shape in shapes.items()}


Shapes = dict[str, tuple[int, ...]]


def _conv(name: str, outputs: int, inputs: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, kernel, kernel, kernel), f"{name}.bias": (outputs,)}


def _affine(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _encoder(config: VideoVAEConfig) -> Shapes:
    widths = config.block_out_channels
    shapes = _conv("encoder.conv_in", widths[0], config.in_channels, 3)
    before = widths[0]
    factors = zip(config.spatial_downsample_factors, config.temporal_downsample_factors, strict=True)
    for level, (width, (space, time)) in enumerate(zip(widths, factors, strict=True)):
        prefix = f"encoder.down_blocks.{level}"
        for index in range(config.layers_per_block):
            shapes |= _resnet(f"{prefix}.resnets.{index}", before, width)
            before = width
        if space * time > 1:
            shapes |= _conv(f"{prefix}.downsamplers.0.conv", width, width, 3)
    shapes |= _affine("encoder.norm_out", widths[-1])
    return shapes | _conv("encoder.conv_out", 2 * config.latent_channels, widths[-1], 3)


def _resnet(prefix: str, inputs: int, outputs: int) -> Shapes:
    shapes = {
        **_affine(f"{prefix}.norm1", inputs),
        **_conv(f"{prefix}.conv1", outputs, inputs, 3),
        **_affine(f"{prefix}.norm2", outputs),
        **_conv(f"{prefix}.conv2", outputs, outputs, 3),
    }
    return shapes if inputs == outputs else shapes | _conv(f"{prefix}.conv_shortcut", outputs, inputs, 1)


def _decoder(config: VideoVAEConfig) -> Shapes:
    width = config.decoder_num_attention_heads * config.decoder_attention_head_dim
    voxel = prod(config.spatial_downsample_factors) ** 2 * prod(config.temporal_downsample_factors)
    shapes: Shapes = {
        "decoder.register_tokens": (1, config.decoder_num_register_tokens, width),
        **_affine("decoder.proj_in", width, config.latent_channels),
        **_affine("decoder.norm_out", width),
        **_affine("decoder.proj_out", config.out_channels * voxel, width),
    }
    for layer in range(config.decoder_num_layers):
        shapes |= _decoder_block(f"decoder.transformer_blocks.{layer}", width, config.decoder_ffn_mult * width)
    return shapes


def _decoder_block(prefix: str, width: int, ffn: int) -> Shapes:
    shapes: Shapes = {f"{prefix}.{name}": (width,) for name in ("norm1.weight", "scale1", "norm2.weight", "scale2")}
    for projection in ("to_q", "to_k", "to_v", "to_out.0"):
        shapes |= _affine(f"{prefix}.attn.{projection}", width, width)
    return shapes | _affine(f"{prefix}.ff.net.0.proj", 2 * ffn, width) | _affine(f"{prefix}.ff.net.2", width, ffn)


_RENAMES: tuple[tuple[str, str], ...] = (
    (r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.conv_shortcut\.", r"encoder.down.\1.block.\2.nin_shortcut."),
    (r"encoder\.down_blocks\.(\d+)\.resnets\.", r"encoder.down.\1.block."),
    (r"encoder\.down_blocks\.(\d+)\.downsamplers\.0\.", r"encoder.down.\1.downsample."),
    (r"decoder\.proj_in\.", "decoder.x_embedder."),
    (r"\.attn\.to_out\.0\.", ".attn.to_out."),
    (r"\.ff\.net\.2\.", ".ff.w2."),
)


def recipes(config: VideoVAEConfig) -> dict[str, Recipe]:
    """Diffusers name -> how it is made from native tensors."""
    return {name: _recipe(name, config.decoder_num_attention_heads) for name in tensors(config)}


def native_only(config: VideoVAEConfig) -> dict[str, Declared]:
    """Native tensors that have no diffusers parameter: a token of the training objective, never read."""
    return {"decoder.mask_token": Declared(None, F32)}


def _recipe(name: str, heads: int) -> Recipe:
    projection = re.fullmatch(r"(decoder\..*\.attn\.)to_([qkv])\.(weight|bias)", name)
    if projection:
        prefix, letter, kind = projection.groups()
        return Projection(f"{prefix}to_qkv.{kind}", "qkv".index(letter), heads)
    if ".ff.net.0.proj." in name:
        return Swapped(name.replace(".ff.net.0.proj.", ".ff.w1."))
    for pattern, native in _RENAMES:
        renamed, count = re.subn(pattern, native, name)
        if count:
            return Whole(renamed)
    return Whole(name)
