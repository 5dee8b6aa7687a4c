"""The audio autoencoder: configuration and tensors; native and diffusers names are the same (spec/model.md 1f)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import FiniteFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from export.checkpoint.components.configuration import (
    Configuration,
    Translation,
    require,
    same_length,
    take,
    take_sizes,
    translate,
)
from export.checkpoint.safetensors_file import Declared
from export.checkpoint.strict_json import section
from plugins.dimensions import AUDIO_CHANNELS, AudioVAEDimensions

F32 = torch.float32
FILTER_TAPS = 12
"""Length of the stored resampling filters."""


class AudioVAEConfig(Configuration):
    """Constructor arguments of `diffusers.AutoencoderKLMiniMaxH3Audio`; the defaults are the release."""

    encoder_dim: PositiveInt = 64
    encoder_rates: tuple[PositiveInt, ...] = (2, 4, 4, 5, 5)
    latent_dim: PositiveInt = 2048
    latent_channels: PositiveInt = 32
    num_attention_heads: PositiveInt = 8
    decoder_dim: PositiveInt = 1024
    decoder_rates: tuple[PositiveInt, ...] = (5, 5, 2, 2, 2, 2, 2)
    decoder_kernel_sizes: tuple[PositiveInt, ...] = (9, 9, 4, 4, 4, 4, 4)
    resblock_kernel_sizes: tuple[PositiveInt, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[PositiveInt, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    sampling_rate: PositiveInt = 32000
    latents_mean: tuple[FiniteFloat, ...]
    latents_std: tuple[PositiveFloat, ...]

    @field_validator("decoder_rates")
    @classmethod
    def _same_hop(cls, values: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        hop = prod(info.data.get("encoder_rates", values))
        if prod(values) != hop:
            raise ValueError(f"rates whose product is the encoder's, {hop}, not {prod(values)}")
        return values

    @field_validator("decoder_kernel_sizes")
    @classmethod
    def _one_for_each_stage(cls, values: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        return same_length(values, info, "decoder_rates")

    @field_validator("resblock_dilation_sizes")
    @classmethod
    def _one_for_each_kernel(cls, values: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        return same_length(values, info, "resblock_kernel_sizes")

    @field_validator("latents_mean", "latents_std")
    @classmethod
    def _one_for_each_channel(cls, values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        return same_length(values, info, "latent_channels")


_KWARGS_KEYS: Mapping[str, str] = {
    "encoder_dim": "encoder_dim",
    "encoder_rates": "encoder_rates",
    "latent_dim": "latent_dim",
    "latent_channels": "vae_latent_channels",
    "decoder_dim": "decoder_dim",
    "decoder_rates": "decoder_rates",
    "sampling_rate": "sample_rate",
}
_OUTER_KEYS: Mapping[str, str] = {"latents_mean": "latents_mean", "latents_std": "latents_std"}


def from_native(outer: dict[str, Any], outer_file: Path, metadata: dict[str, Any], file: Path) -> Translation:
    """Constructor arguments from the native config.json (`outer`) and metadata.json (`metadata`).

    Raises:
        CheckpointError: a key is absent, or selects an architecture that H3 does not have.
    """
    kwargs = section(section(metadata, "metadata", file), "kwargs", file)
    require(kwargs, "attn_proj", True, file)
    require(kwargs, "decoder_type", "bigvgan", file)
    require(outer, "output_channel", AUDIO_CHANNELS, outer_file)
    require(outer, "sample_rate", take(kwargs, "sample_rate", file), outer_file)
    kernels = [upsampling_kernel(rate) for rate in take_sizes(kwargs, "decoder_rates", file)]
    return (
        Translation({"decoder_kernel_sizes": kernels}, {})
        | translate(_KWARGS_KEYS, kwargs, file, "metadata.kwargs.")
        | translate(_OUTER_KEYS, outer, outer_file)
    )


def upsampling_kernel(rate: int) -> int:
    """Kernel of an upsampling stage, which the native files leave to the code: 9 for 5, 4 for 2."""
    return 2 * rate - rate % 2


def to_native(config: AudioVAEConfig) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The native config.json, metadata.json and text of config.yaml that describe the same model."""
    outer = {
        "_class_name": "MiniMaxH3AudioVAE",
        "output_channel": AUDIO_CHANNELS,
        "sample_rate": config.sampling_rate,
        "source_config_path": "config.yaml",
        "source_safetensors_path": "model.safetensors",
        "source_metadata_path": "metadata.json",
        "latent_channels": config.latent_channels,
        "latents_mean": list(config.latents_mean),
        "latents_std": list(config.latents_std),
    }
    kwargs = {
        "attn_proj": True,
        "decoder_dim": config.decoder_dim,
        "decoder_rates": list(config.decoder_rates),
        "decoder_type": "bigvgan",
        "encoder_dim": config.encoder_dim,
        "encoder_rates": list(config.encoder_rates),
        "latent_dim": config.latent_dim,
        "sample_rate": config.sampling_rate,
        "vae_latent_channels": config.latent_channels,
    }
    fields = {
        "sr": config.sampling_rate,
        "decoder_dim": config.decoder_dim,
        "audio_channel": 1,
        "vae_latent_channels": config.latent_channels,
    }
    yaml = "model_config:\n" + "".join(f"  {key}: {value}\n" for key, value in fields.items())
    return outer, {"metadata": {"kwargs": kwargs}}, yaml


def dimensions(config: AudioVAEConfig) -> AudioVAEDimensions:
    """The sizes that the rest of the compiler reads."""
    return AudioVAEDimensions(
        latent_channels=config.latent_channels,
        latents_mean=config.latents_mean,
        latents_std=config.latents_std,
        sample_rate=config.sampling_rate,
        hop=prod(config.decoder_rates),
    )


def tensors(config: AudioVAEConfig) -> dict[str, Declared]:
    """Every parameter and stored filter by its name, all float32."""
    width, latent = config.latent_dim, config.latent_channels
    shapes = {
        **_encoder(config),
        **_pre_block(width, latent),
        **_pointwise("mean_proj", latent, latent),
        **_pointwise("logs_proj", latent, latent),
        **_pointwise("dec_in_proj", width, latent),
        **_decoder(config),
    }
    return {name: Declared(shape, F32) for name, shape in shapes.items()}


Shapes = dict[str, tuple[int, ...]]


def _pointwise(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, 1), f"{name}.bias": (outputs,)}


def _affine(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _normed(name: str, *shape: int, outputs: int) -> Shapes:
    """A weight-normalised convolution: direction `weight_v`, one gain `weight_g` for each index of its first axis."""
    return {f"{name}.weight_g": (shape[0], 1, 1), f"{name}.weight_v": shape, f"{name}.bias": (outputs,)}


def _conv(name: str, outputs: int, inputs: int, kernel: int) -> Shapes:
    return _normed(name, outputs, inputs, kernel, outputs=outputs)


def _encoder(config: AudioVAEConfig) -> Shapes:
    width = config.encoder_dim
    shapes = _conv("encoder.block.0", width, 1, 7)
    for stage, rate in enumerate(config.encoder_rates, start=1):
        prefix = f"encoder.block.{stage}.block"
        for unit in range(3):
            shapes |= {f"{prefix}.{unit}.block.{snake}.alpha": (1, width, 1) for snake in (0, 2)}
            shapes |= _conv(f"{prefix}.{unit}.block.1", width, width, 7)
            shapes |= _conv(f"{prefix}.{unit}.block.3", width, width, 1)
        shapes[f"{prefix}.3.alpha"] = (1, width, 1)
        shapes |= _conv(f"{prefix}.4", 2 * width, width, 2 * rate)
        width *= 2
    last = len(config.encoder_rates) + 1
    shapes[f"encoder.block.{last}.alpha"] = (1, width, 1)
    return shapes | _conv(f"encoder.block.{last + 1}", config.latent_dim, width, 3)


def _pre_block(width: int, latent: int) -> Shapes:
    attention = {
        "pre_block.attn.q_bias": (width,),
        "pre_block.attn.v_bias": (width,),
        "pre_block.attn.zero_k_bias": (width,),
        "pre_block.attn.qkv.weight": (3 * width, width),
        **_affine("pre_block.attn.proj", latent, latent),
    }
    mlp = {
        **_affine("pre_block.mlp.norm", latent),
        **_affine("pre_block.mlp.w0", 2 * latent, latent),
        **_affine("pre_block.mlp.w1", 2 * latent, latent),
        **_affine("pre_block.mlp.w2", latent, 2 * latent),
    }
    norms = {
        **_affine("pre_block.norm1", width),
        **_affine("pre_block.norm3", width),
        **_affine("pre_block.norm2", latent),
    }
    return attention | mlp | norms | _affine("pre_block.proj", latent, width)


def _activation(name: str, channels: int) -> Shapes:
    taps = (1, 1, FILTER_TAPS)
    filters = {f"{name}.upsample.filter": taps, f"{name}.downsample.lowpass.filter": taps}
    return {f"{name}.act.alpha": (channels,), f"{name}.act.beta": (channels,), **filters}


def _decoder(config: AudioVAEConfig) -> Shapes:
    width = config.decoder_dim
    shapes = _conv("decoder.conv_pre", width, config.latent_dim, 7)
    blocks = tuple(zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True))
    for stage, kernel in enumerate(config.decoder_kernel_sizes):
        shapes |= _normed(f"decoder.ups.{stage}.0", width, width // 2, kernel, outputs=width // 2)
        width //= 2
        for index, (size, dilations) in enumerate(blocks):
            prefix = f"decoder.resblocks.{stage * len(blocks) + index}"
            for step in range(len(dilations)):
                shapes |= _conv(f"{prefix}.convs1.{step}", width, width, size)
                shapes |= _conv(f"{prefix}.convs2.{step}", width, width, size)
            for step in range(2 * len(dilations)):
                shapes |= _activation(f"{prefix}.activations.{step}", width)
    shapes |= _activation("decoder.activation_post", width)
    return shapes | {"decoder.conv_post.weight_g": (1, 1, 1), "decoder.conv_post.weight_v": (1, width, 7)}
