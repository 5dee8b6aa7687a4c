"""The video VAE's encoder for one tile: a clip of 17 frames of 256x256 pixels, or a single frame, to its moments.

Clips are independent of one another, and so are frames in every norm; time is padded in front only. Always float32:
the conditions of a request are encoded once, and their rounding would stay in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import conv3d, pad

from export.graphs.graph import Axis, Graph, TensorSpec
from plugins.ops.frame_norm import OP as FRAME_NORM

if TYPE_CHECKING:
    from export.checkpoint import Checkpoint

KERNEL = 3
"""Side of every convolution but the pointwise ones."""

CLIP_LATENTS = Axis("clip_latents", 1, 5)
"""Latent frames of a clip: 5 for 17 frames, 1 for a single frame."""

Factors = tuple[int, int, int]


@dataclass(frozen=True)
class EncoderPlan:
    """The encoder's sizes. `config` is that of `diffusers.AutoencoderKLMiniMaxH3`."""

    config: Mapping[str, Any]

    @property
    def groups(self) -> int:
        """Groups of every norm."""
        return int(self.config["norm_num_groups"])

    @property
    def eps(self) -> float:
        """Epsilon of every norm."""
        return float(self.config["norm_eps"])

    @property
    def moments(self) -> int:
        """Channels of mean and log-variance together."""
        return 2 * int(self.config["latent_channels"])

    @property
    def levels(self) -> list[tuple[int, int, Factors]]:
        """Each level's channels in and out, and what it divides time, height and width by."""
        widths = self.config["block_out_channels"]
        space, time = self.config["spatial_downsample_factors"], self.config["temporal_downsample_factors"]
        factors = [(t, s, s) for t, s in zip(time, space, strict=True)]
        return list(zip((widths[0], *widths[:-1]), widths, factors, strict=True))


class CausalConv(nn.Conv3d):
    """A 3x3x3 convolution that looks at this frame and the two before it, and keeps the size of a frame.

    Before the first frame there is nothing, zeros; beyond an edge there is the configured padding.
    """

    def __init__(self, inputs: int, outputs: int, plan: EncoderPlan) -> None:
        super().__init__(inputs, outputs, KERNEL)
        self.mode = plan.config["spatial_padding_mode"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Frames [1, C, t, h, w] to frames [1, C', t, h, w]."""
        return conv3d(_after_nothing(pad(x, (1, 1, 1, 1, 0, 0), mode=self.mode)), self.weight, self.bias)


def _after_nothing(x: torch.Tensor) -> torch.Tensor:
    return pad(x, (0, 0, 0, 0, KERNEL - 1, 0))


class FrameNorm(nn.Module):
    """Group normalisation of every frame by itself, then SiLU."""

    def __init__(self, channels: int, plan: EncoderPlan) -> None:
        super().__init__()
        self.groups, self.eps = plan.groups, plan.eps
        self.weight, self.bias = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Frames [1, C, t, h, w] to frames of the same shape."""
        return FRAME_NORM(x, self.weight, self.bias, self.groups, self.eps)


class Resnet(nn.Module):
    """Two convolutions, each after a norm, beside a shortcut, which is pointwise where the width changes."""

    def __init__(self, inputs: int, outputs: int, plan: EncoderPlan) -> None:
        super().__init__()
        self.norm1, self.conv1 = FrameNorm(inputs, plan), CausalConv(inputs, outputs, plan)
        self.norm2, self.conv2 = FrameNorm(outputs, plan), CausalConv(outputs, outputs, plan)
        self.conv_shortcut = nn.Identity() if inputs == outputs else nn.Conv3d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Frames [1, C, t, h, w] to frames [1, C', t, h, w]."""
        inner = self.conv1(self.norm1(x))
        inner = self.conv2(self.norm2(inner))
        return self.conv_shortcut(x) + inner


class Downsample(nn.Module):
    """A strided convolution; a frame that is halved is padded by one pixel at the right and at the bottom only."""

    def __init__(self, channels: int, factors: Factors, plan: EncoderPlan) -> None:
        super().__init__()
        self.halves, self.mode = factors[1] == 2, plan.config["spatial_padding_mode"]
        self.conv = nn.Conv3d(channels, channels, KERNEL, stride=factors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Frames [1, C, t, h, w] to frames [1, C, ceil(t / ft), h / fs, w / fs]."""
        x = pad(x, (0, 1, 0, 1, 0, 0), mode=self.mode) if self.halves else x
        result: torch.Tensor = self.conv(_after_nothing(x))
        return result


class Level(nn.Module):
    """Resnets of one width, then the downsampling that leads to the next level, where there is any."""

    def __init__(self, inputs: int, outputs: int, factors: Factors, plan: EncoderPlan) -> None:
        super().__init__()
        widths = [inputs, *[outputs] * plan.config["layers_per_block"]]
        self.resnets = nn.ModuleList(Resnet(a, b, plan) for a, b in pairwise(widths))
        strided = max(factors) > 1
        self.downsamplers = nn.ModuleList([Downsample(outputs, factors, plan)] if strided else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Frames [1, C, t, h, w] to the next level's."""
        for part in (*self.resnets, *self.downsamplers):
            x = part(x)
        return x


class Encoder(nn.Module):
    """The convolutional encoder (spec/model.md 6.1). Parameters have diffusers' names."""

    def __init__(self, plan: EncoderPlan) -> None:
        super().__init__()
        levels = plan.levels
        self.conv_in = CausalConv(plan.config["in_channels"], levels[0][0], plan)
        self.down_blocks = nn.ModuleList(Level(*level, plan) for level in levels)
        self.norm_out = FrameNorm(levels[-1][1], plan)
        self.conv_out = CausalConv(levels[-1][1], plan.moments, plan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Frames [1, 3, t, h, w] to raw moments [1, 48, t', h', w']."""
        x = self.conv_in(x)
        for level in self.down_blocks:
            x = level(x)
        result: torch.Tensor = self.conv_out(self.norm_out(x))
        return result


class TileEncoder(nn.Module):
    """The encoder and `quant_conv`."""

    def __init__(self, plan: EncoderPlan) -> None:
        super().__init__()
        self.encoder = Encoder(plan)
        self.quant_conv = nn.Conv3d(plan.moments, plan.moments, 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """ImageNet-normalised RGB [1, 3, t, 256, 256] to mean and log-variance [1, 48, ceil(t / 4), 16, 16]."""
        result: torch.Tensor = self.quant_conv(self.encoder(frames))
        return result


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `video_encoder_tile` graph: float32 whatever `compute` is."""
    dimensions = checkpoint.dimensions.video_vae
    plan = EncoderPlan(checkpoint.config("video_vae", partition))
    parameters = checkpoint.parameters("video_vae", partition)
    clip_frames = Axis("clip_frames", 1, dimensions.clip_frames, provable=False)
    side, cells = dimensions.tile, dimensions.tile_latents
    graph = Graph(
        name="video_encoder_tile",
        module=lambda: TileEncoder(plan),
        inputs=(TensorSpec("frames", torch.float32, (1, plan.config["in_channels"], clip_frames, side, side)),),
        outputs=(TensorSpec("moments", torch.float32, (1, plan.moments, CLIP_LATENTS, cells, cells)),),
        weights=({n: w for n, w in parameters.items() if n.startswith(("encoder.", "quant_conv."))},),
        # A clip of 5 frames goes through everything that one of 17 does.
        trials=tuple({"clip_frames": n, "clip_latents": _latents(n, dimensions.temporal_ratio)} for n in (1, 5)),
    )
    return (graph,)


def _latents(frames: int, ratio: int) -> int:
    return -(-frames // ratio)
