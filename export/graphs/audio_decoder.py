"""The audio VAE's decoder: normalised latents of both channels to their waveforms, always in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from export.checkpoint.expressions import Weight
from export.graphs.graph import Axis, Graph, TensorSpec
from plugins.dimensions import AUDIO_CHANNELS
from plugins.ops.alias_free_snake import OP as ALIAS_FREE_SNAKE
from plugins.ops.alias_free_snake import TAPS

if TYPE_CHECKING:
    from export.checkpoint import Checkpoint

AUDIO_LATENTS = Axis("audio_latents", 1, 4096)
"""A: audio latents of one channel, 40 a second; 603 for the longest clip."""

_GAIN, _DIRECTION = ".weight_g", ".weight_v"


class Snake(nn.Module):
    """Parameters of one SnakeBeta activation, logarithms of frequency and magnitude, [channels]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(channels))


class LowPass(nn.Module):
    """A stored resampling filter, [1, 1, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.empty(1, 1, TAPS))


class Activation(nn.Module):
    """The alias-free activation, one node of the graph."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.act, self.upsample = Snake(channels), LowPass()
        self.downsample = nn.ModuleDict({"lowpass": LowPass()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Samples [B, C, L] to samples of the same shape."""
        filters = self.upsample.filter, self.downsample["lowpass"].filter
        return ALIAS_FREE_SNAKE(x, self.act.alpha, self.act.beta, *filters)


class ResidualBlock(nn.Module):
    """BigVGAN's AMP block: for each dilation, activation, dilated convolution, activation, convolution, and a sum."""

    def __init__(self, channels: int, kernel: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(_same(channels, channels, kernel, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(_same(channels, channels, kernel) for _ in dilations)
        self.activations = nn.ModuleList(Activation(channels) for _ in range(2 * len(dilations)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Samples [B, C, L] to samples of the same shape."""
        steps = zip(self.activations[::2], self.convs1, self.activations[1::2], self.convs2, strict=True)
        for first, dilated, second, plain in steps:
            x = plain(second(dilated(first(x)))) + x
        return x


class BigVGAN(nn.Module):
    """The generator: transposed convolutions, each followed by the mean of parallel residual blocks (arXiv 2206.04658).

    Every convolution has the plain weight that its weight-normed pair stands for. Parameters have diffusers' names.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["decoder_dim"]
        self.conv_pre = _same(config["latent_dim"], width, 7)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in zip(config["decoder_rates"], config["decoder_kernel_sizes"], strict=True):
            up = nn.ConvTranspose1d(width, width // 2, kernel, rate, padding=(kernel - rate) // 2)
            self.ups.append(nn.Sequential(up))
            width //= 2
            blocks = zip(config["resblock_kernel_sizes"], config["resblock_dilation_sizes"], strict=True)
            self.resblocks.extend(ResidualBlock(width, size, dilations) for size, dilations in blocks)
        self.activation_post = Activation(width)
        self.conv_post = _same(width, 1, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features [B, latent_dim, A] to samples [B, 1, hop A], clipped to [-1, 1]."""
        parallel = len(self.resblocks) // len(self.ups)
        x = self.conv_pre(x)
        for stage, up in enumerate(self.ups):
            x = up(x)
            first, *others = self.resblocks[stage * parallel : (stage + 1) * parallel]
            x = sum((block(x) for block in others), start=first(x)) / parallel
        return self.conv_post(self.activation_post(x)).clamp(-1.0, 1.0)


class AudioDecoder(nn.Module):
    """De-normalisation, input projection and generator (spec/model.md 6.5).

    `config` is that of `diffusers.AutoencoderKLMiniMaxH3Audio`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.mean, self.std = config["latents_mean"], config["latents_std"]
        self.dec_in_proj = nn.Conv1d(config["latent_channels"], config["latent_dim"], 1)
        self.decoder = BigVGAN(config)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised latents [2, channels, A] to waveforms [2, 1, hop A] in [-1, 1]."""
        std, mean = (torch.tensor(values, dtype=torch.float32).unsqueeze(-1) for values in (self.std, self.mean))
        return self.decoder(self.dec_in_proj(latents * std + mean))


def _same(inputs: int, outputs: int, kernel: int, dilation: int = 1, bias: bool = True) -> nn.Conv1d:
    """A convolution that keeps the length; kernels are odd."""
    return nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2, bias=bias)


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `audio_decoder` graph: float32 whatever `compute` is, as half precision costs 20 dB (spec/model.md 6.5)."""
    config = checkpoint.config("audio_vae", partition)
    dimensions = checkpoint.dimensions.audio_vae
    hop = dimensions.hop
    samples = Axis("samples", hop * AUDIO_LATENTS.minimum, hop * AUDIO_LATENTS.maximum, multiple=hop)
    graph = Graph(
        name="audio_decoder",
        module=lambda: AudioDecoder(config),
        inputs=(TensorSpec("latents", torch.float32, (AUDIO_CHANNELS, dimensions.latent_channels, AUDIO_LATENTS)),),
        outputs=(TensorSpec("waveform", torch.float32, (AUDIO_CHANNELS, 1, samples)),),
        weights=(folded(checkpoint.parameters("audio_vae", partition), ("decoder.", "dec_in_proj.")),),
        trials=tuple({"audio_latents": n, "samples": hop * n} for n in (3, 11)),
    )
    return (graph,)


def folded(parameters: Mapping[str, Weight], prefixes: tuple[str, ...]) -> dict[str, Weight]:
    """The audio VAE's parameters and filters under some prefixes, with gains and directions made into weights."""
    kept = {name: weight for name, weight in parameters.items() if name.startswith(prefixes)}
    plain = {
        name.replace(_DIRECTION, ".weight"): Weight.weight_normed(direction, kept[name.replace(_DIRECTION, _GAIN)])
        for name, direction in kept.items()
        if name.endswith(_DIRECTION)
    }
    return plain | {name: weight for name, weight in kept.items() if not name.endswith((_GAIN, _DIRECTION))}
