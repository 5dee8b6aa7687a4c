"""Well-conditioned initial values for each component, by diffusers / transformers parameter name.

Matrices keep the size of what passes through them, residual branches add a fraction of the stream, and every norm,
bias and gate differs from its neutral value, so that leaving any of them out of an implementation shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from export.checkpoint.components import audio_vae, denoiser, text_encoder, video_vae
from export.checkpoint.safetensors_file import Declared
from export.miniature.draw import Draw
from plugins.dimensions import AUDIO_TAG, MODALITIES, TEXT_TAG, VIDEO_TAG

SILU_RMS = 0.6
"""RMS of silu(x) for x ~ N(0, 1); also about that of up * silu(gate)."""

ROUTED_GAIN = 2.5
"""How far the routed heads' queries and keys lean towards each other, in units of their own spread."""

Values = dict[str, torch.Tensor]


class Normal(NamedTuple):
    """Mean and standard deviation of a tensor's values."""

    mean: float
    std: float


def _fill(tensors: Mapping[str, Declared], draw: Draw, rule: Callable[[str, tuple[int, ...]], Normal]) -> Values:
    values = {}
    for name, declared in tensors.items():
        shape = declared.shape or ()
        mean, std = rule(name, shape)
        values[name] = draw.normal(name, shape, std, mean).to(declared.dtype)
    return values


def _fan_in(shape: tuple[int, ...]) -> float:
    return math.prod(shape[1:]) ** -0.5


def denoiser_values(config: denoiser.DenoiserConfig, draw: Draw) -> Values:
    """The transformer. Half the heads of each block are routed: media rows look for text rows there (see `_route`)."""
    tensors = denoiser.tensors(config)
    values = _fill(tensors, draw, _denoiser_rule)
    for layer in range(config.num_layers):
        prefix = f"transformer_blocks.{layer}"
        routed = _route(values, prefix, config, draw)
        values |= {name: value.to(tensors[name].dtype) for name, value in routed.items()}
    return values


def _denoiser_rule(name: str, shape: tuple[int, ...]) -> Normal:
    if name.endswith("adaln_proj.linear.bias"):
        return Normal(0.0, 0.1)
    if name.endswith(("norm_q.weight", "norm_k.weight")):
        return Normal(1.3, 0.1)
    if ".norm" in name and len(shape) == 1:
        return Normal(1.0, 0.1)
    if name.endswith(".bias"):
        return Normal(0.0, 0.1)
    gains = {
        "context_embedder.weight": 0.6,
        "time_embedder.linear_1.weight": math.sqrt(2.0),
        "time_embedder.linear_2.weight": 1 / SILU_RMS,
        "norm_out.linear.weight": 0.2 / SILU_RMS,
    }
    if name.endswith("adaln_proj.linear.weight"):
        return Normal(0.0, 0.2 / SILU_RMS * _fan_in(shape))
    if name.endswith("ff.net.2.weight"):
        return Normal(0.0, _fan_in(shape) / SILU_RMS)
    if name.endswith("to_v.weight"):
        # An average over the attended rows is smaller than each of them.
        return Normal(0.0, 2 * _fan_in(shape))
    return Normal(0.0, gains.get(name, 1.0) * _fan_in(shape))


def _route(values: Values, prefix: str, config: denoiser.DenoiserConfig, draw: Draw) -> Values:
    """Makes the prompt heard: without it, some twenty text rows among thousands would carry 1% of the attention.

    The AdaLN shift marks text rows with one direction and media rows with another; in every second head, keys of the
    first and queries of the second gain a common component in the channels that the rotary embedding leaves alone.
    """
    width, heads, channels = config.hidden_size, config.num_attention_heads, config.attention_head_dim
    text, media = draw.normal(f"{prefix}.marks", (2, width), 1.0)
    bias = values[f"{prefix}.adaln_proj.linear.bias"].float().view(MODALITIES, 6, width)
    for tag, mark in ((TEXT_TAG, text), (VIDEO_TAG, media), (AUDIO_TAG, media)):
        bias[tag, 0] += mark
        bias[tag, 2] += 1.0
        bias[tag, 5] += 0.7
    routed = {f"{prefix}.adaln_proj.linear.bias": bias.flatten()}
    plain = 6 * config.rope_freq_dim
    direction = draw.normal(f"{prefix}.direction", (heads, channels), 1.0).sign()
    direction[:, :plain] = 0
    direction[1::2] = 0
    for name, mark in (("to_k", text), ("to_q", media)):
        key = f"{prefix}.attn.{name}.weight"
        routed[key] = values[key].float() + ROUTED_GAIN / width * torch.outer(direction.flatten(), mark)
    return routed


def text_encoder_values(config: text_encoder.TextEncoderConfig, draw: Draw) -> Values:
    """Qwen3-VL. Each branch adds about 0.15 to a stream of about 1, so 50 layers do not amplify rounding."""

    def rule(name: str, shape: tuple[int, ...]) -> Normal:
        if "q_norm" in name or "k_norm" in name:
            return Normal(1.3, 0.1)
        if "norm" in name and len(shape) == 1:
            return Normal(0.0, 0.1) if name.endswith(".bias") else Normal(1.0, 0.1)
        if name.endswith(".bias"):
            return Normal(0.0, 0.1)
        if "embed_tokens" in name or "pos_embed" in name:
            return Normal(0.0, 1.0)
        branch = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", ".mlp.linear_fc2.weight"))
        return Normal(0.0, (0.35 if branch else 1.0) * _fan_in(shape))

    return _fill(text_encoder.tensors(config), draw, rule)


def video_vae_values(config: video_vae.VideoVAEConfig, draw: Draw) -> Values:
    """The video VAE: decoded RGB is spread about the ImageNet mean with few pixels outside [0, 1]."""
    values = _fill(video_vae.tensors(config), draw, _video_vae_rule)
    # Second half: log-variances of the posterior, small as a trained one's.
    values["quant_conv.bias"][config.latent_channels :] -= 6.0
    return values


def _video_vae_rule(name: str, shape: tuple[int, ...]) -> Normal:
    if name.endswith((".scale1", ".scale2")):
        return Normal(0.5, 0.1)
    if ".norm" in name and name.endswith(".weight"):
        return Normal(1.0, 0.1)
    if name.endswith(".bias"):
        return Normal(0.0, 0.1)
    if name == "decoder.register_tokens":
        return Normal(0.0, 1.0)
    gains = {"decoder.proj_in.weight": 0.5, "decoder.proj_out.weight": 0.5}
    gain = 0.5 if name.endswith(".conv2.weight") else gains.get(name, 1.0)
    return Normal(0.0, gain * _fan_in(shape))


def audio_vae_values(config: audio_vae.AudioVAEConfig, draw: Draw) -> Values:
    """The audio VAE: gentle snake activations, small residual branches, and no DC in the last convolution."""
    tensors = audio_vae.tensors(config)
    values = _fill(tensors, draw, _audio_vae_rule)
    taps = torch.from_numpy(resampling_filter())
    values |= {name: taps.clone() for name in tensors if name.endswith("filter")}
    values["pre_block.attn.zero_k_bias"] = torch.zeros(config.latent_dim)
    # sin^2 activations have a positive mean; taps that sum to zero keep it out of the sound.
    last = values["decoder.conv_post.weight_v"]
    values["decoder.conv_post.weight_v"] = last - last.mean(dim=2, keepdim=True)
    for stage, rate in enumerate(config.decoder_rates):
        # A transposed convolution spreads each input over `rate` outputs and halves the channels.
        values[f"decoder.ups.{stage}.0.weight_g"] *= math.sqrt(rate / 2)
    return values


def _audio_vae_rule(name: str, shape: tuple[int, ...]) -> Normal:
    if name.endswith("act.alpha"):
        return Normal(0.0, 0.1)
    if name.endswith("act.beta"):
        return Normal(0.7, 0.1)
    if name.endswith(".alpha"):
        return Normal(1.0, 0.1)
    if name.endswith(".weight_g"):
        gain = 0.3 if ".convs2." in name or ".block.3.weight_g" in name else 1.0
        gain = 0.15 if name.startswith("decoder.conv_post") else gain
        return Normal(gain, 0.05 * gain)
    if name.endswith(".weight_v"):
        return Normal(0.0, _fan_in(shape))
    if ".norm" in name and name.endswith(".weight"):
        return Normal(1.0, 0.1)
    if name.endswith("bias"):
        return Normal(0.0, 0.05)
    return Normal(0.0, (0.5 if name == "dec_in_proj.weight" else 1.0) * _fan_in(shape))


def resampling_filter(taps: int = audio_vae.FILTER_TAPS, cutoff: float = 0.25, half_width: float = 0.3) -> np.ndarray:
    """The Kaiser-windowed sinc low-pass filter that the audio VAE stores, float32 [1, 1, taps], summing to 1."""
    attenuation = 2.285 * (taps // 2 - 1) * math.pi * 4 * half_width + 7.95
    beta = 0.1102 * (attenuation - 8.7)  # Kaiser's formula for attenuations over 50 dB; here it is 51.0.
    time = np.arange(taps) - (taps - 1) / 2
    values = 2 * cutoff * np.kaiser(taps, beta) * np.sinc(2 * cutoff * time)
    return (values / values.sum()).astype(np.float32).reshape(1, 1, taps)
