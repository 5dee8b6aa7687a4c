"""The audio VAE's encoder: waveforms of both channels to the means of their latents, always in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import gelu

from export.checkpoint.expressions import Weight
from export.graphs.audio_decoder import AUDIO_LATENTS, folded
from export.graphs.graph import Axis, Graph, TensorSpec
from plugins.dimensions import AUDIO_CHANNELS
from plugins.ops.snake import OP as SNAKE

if TYPE_CHECKING:
    from export.checkpoint import Checkpoint

DILATIONS = (1, 3, 9)
"""Of the residual units of a stage."""


class Snake(nn.Module):
    """The snake activation, a frequency for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Samples [B, C, L] to samples of the same shape."""
        return SNAKE(x, self.alpha)


class ResidualUnit(nn.Module):
    """A dilated and a pointwise convolution, each after a snake, beside a shortcut."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        dilated = nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation)
        self.block = nn.Sequential(Snake(channels), dilated, Snake(channels), nn.Conv1d(channels, channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Samples [B, C, L] to samples of the same shape."""
        result: torch.Tensor = x + self.block(x)
        return result


class Stage(nn.Module):
    """Residual units, then a convolution that doubles the channels and divides the samples by `rate`."""

    def __init__(self, channels: int, rate: int) -> None:
        super().__init__()
        units = [ResidualUnit(channels, dilation) for dilation in DILATIONS]
        strided = nn.Conv1d(channels, 2 * channels, 2 * rate, stride=rate, padding=math.ceil(rate / 2))
        self.block = nn.Sequential(*units, Snake(channels), strided)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Samples [B, C, L] to samples [B, 2 C, L / rate]."""
        result: torch.Tensor = self.block(x)
        return result


class Trunk(nn.Module):
    """DAC's waveform encoder (arXiv 2306.06546). Parameters have diffusers' names, weight norms are folded."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["encoder_dim"]
        parts: list[nn.Module] = [nn.Conv1d(1, width, 7, padding=3)]
        for rate in config["encoder_rates"]:
            parts.append(Stage(width, rate))
            width *= 2
        self.block = nn.Sequential(*parts, Snake(width), nn.Conv1d(width, config["latent_dim"], 3, padding=1))

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        """Waveforms [B, 1, hop A] to features [B, latent_dim, A]."""
        result: torch.Tensor = self.block(waveform)
        return result


class PooledAttention(nn.Module):
    """Causal attention whose heads are averaged, not joined, and whose channels are then pooled to the latents'."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.width, self.heads = config["latent_dim"], config["num_attention_heads"]
        self.outputs = config["latent_channels"]
        self.qkv = nn.Linear(self.width, 3 * self.width)
        self.proj = nn.Linear(self.outputs, self.outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [B, A, latent_dim] to rows [B, A, channels]."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = _causal(query, key, value).mean(dim=1)
        result: torch.Tensor = self.proj(mixed @ self._pooling(mixed.shape[-1]))
        return result

    def _pooling(self, channels: int) -> torch.Tensor:
        """Adaptive average pooling as a matrix [channels, outputs]: 8 channels a bin as released."""
        starts = [i * channels // self.outputs for i in range(self.outputs)]
        ends = [-(-(i + 1) * channels // self.outputs) for i in range(self.outputs)]
        rows = [
            [1 / (end - start) if start <= c < end else 0.0 for start, end in zip(starts, ends, strict=True)]
            for c in range(channels)
        ]
        return torch.tensor(rows)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of each row to itself and those before it; all are [B, heads, A, d].

    In plain products: a few hundred rows once a request, for which TensorRT has no fused kernel in float32.
    """
    places = torch.arange(query.shape[2])
    later = places > places.unsqueeze(-1)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ value


class GatedMLP(nn.Module):
    """GeGLU after a norm, with the tanh approximation of GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.w0, self.w1 = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.w2 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [B, A, channels] to rows of the same shape."""
        x = self.norm(x)
        result: torch.Tensor = self.w2(gelu(self.w0(x), approximate="tanh") * self.w1(x))
        return result


class Narrowing(nn.Module):
    """From the trunk's width to the latents': attention beside a projection, then a feed-forward."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, channels = config["latent_dim"], config["latent_channels"]
        self.norm1, self.norm3, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(channels)
        self.attn = PooledAttention(config)
        self.proj = nn.Linear(width, channels)
        self.mlp = GatedMLP(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [B, A, latent_dim] to rows [B, A, channels]."""
        x = self.proj(self.norm3(x)) + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class AudioEncoder(nn.Module):
    """Trunk, narrowing and the posterior's mean (spec/model.md 6.5).

    `config` is that of `diffusers.AutoencoderKLMiniMaxH3Audio`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        channels = config["latent_channels"]
        self.encoder, self.pre_block = Trunk(config), Narrowing(config)
        self.mean_proj = nn.Conv1d(channels, channels, 1)

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        """Waveforms [2, 1, hop A] in [-1, 1] to means [2, channels, A], not normalised."""
        rows = self.pre_block(self.encoder(waveform).transpose(1, 2))
        result: torch.Tensor = self.mean_proj(rows.transpose(1, 2))
        return result


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `audio_encoder` graph: float32 whatever `compute` is."""
    config = checkpoint.config("audio_vae", partition)
    dimensions = checkpoint.dimensions.audio_vae
    hop = dimensions.hop
    samples = Axis("audio_samples", hop * AUDIO_LATENTS.minimum, hop * AUDIO_LATENTS.maximum, multiple=hop)
    graph = Graph(
        name="audio_encoder",
        module=lambda: AudioEncoder(config),
        inputs=(TensorSpec("waveform", torch.float32, (AUDIO_CHANNELS, 1, samples)),),
        outputs=(TensorSpec("mean", torch.float32, (AUDIO_CHANNELS, dimensions.latent_channels, AUDIO_LATENTS)),),
        weights=(_weights(checkpoint.parameters("audio_vae", partition)),),
        trials=tuple({"audio_samples": hop * n, "audio_latents": n} for n in (2, 11)),
    )
    return (graph,)


def _weights(parameters: Mapping[str, Weight]) -> dict[str, Weight]:
    """The encoder's parameters, with weight norms folded and the three parts of the packed bias joined."""
    weights = folded(parameters, ("encoder.", "pre_block.", "mean_proj."))
    parts = [weights.pop(f"pre_block.attn.{name}") for name in ("q_bias", "zero_k_bias", "v_bias")]
    return weights | {"pre_block.attn.qkv.bias": Weight.concat(parts)}
