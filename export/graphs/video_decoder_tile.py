"""The video VAE's decoder for one tile: 7 latent frames of 16x16 cells to 28 frames of 256x256 pixels.

The graph is static on purpose: rotary angles are scaled by the tile's size, so another size is another function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm

from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.recipes import QKVLayout
from export.graphs.attention import Projections, Rotary, attend, rotate
from export.graphs.feed_forward import FeedForward
from export.graphs.graph import Graph, TensorSpec
from plugins.dimensions import VideoVAEDimensions

if TYPE_CHECKING:
    from export.checkpoint import Checkpoint

AXES = 3
"""Rotated axes: time, height, width."""

TEMPORAL_PATCH = 4
"""Frames that one latent frame becomes."""

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class TilePlan:
    """Everything that the module needs: the tile, the decoder's sizes and how the checkpoint packs its layers.

    `config` is that of `diffusers.AutoencoderKLMiniMaxH3`. `gate_first`: a packed gate and up is [gate; up].
    """

    dimensions: VideoVAEDimensions
    config: Mapping[str, Any]
    qkv: QKVLayout
    gate_first: bool
    compute: torch.dtype

    @property
    def grid(self) -> Grid:
        """Latent cells (time, height, width)."""
        side = self.dimensions.tile_latents
        return self.dimensions.chunk_latents, side, side

    @property
    def patch(self) -> Grid:
        """Pixels (time, height, width) of one cell."""
        return TEMPORAL_PATCH, self.dimensions.spatial_ratio, self.dimensions.spatial_ratio

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.config["decoder_num_attention_heads"]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.config["decoder_attention_head_dim"]

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.heads * self.head_dim

    @property
    def eps(self) -> float:
        """Epsilon of every norm."""
        return self.config["decoder_norm_eps"]


class TileAttention(nn.Module):
    """Attention over all tokens of the tile; queries and keys are RMS-normed in float32, without a weight."""

    def __init__(self, plan: TilePlan) -> None:
        super().__init__()
        self.eps = plan.eps
        self.project = Projections(plan.width, plan.heads, plan.head_dim, plan.qkv, plan.compute, bias=True)
        self.out = nn.Linear(plan.width, plan.width, dtype=plan.compute)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Tokens [n, D] to tokens [n, D]."""
        query, key, value = self.project(x)
        query, key = (rotate(self._norm(part), rotary) for part in (query, key))
        return self.out(attend(query, key, value))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class TileBlock(nn.Module):
    """Attention and feed-forward, each scaled per channel; norms, scales and the residual stream are float32."""

    def __init__(self, plan: TilePlan) -> None:
        super().__init__()
        self.compute = plan.compute
        self.norm1 = nn.RMSNorm(plan.width, eps=plan.eps)
        self.norm2 = nn.RMSNorm(plan.width, eps=plan.eps)
        self.scale1, self.scale2 = nn.Parameter(torch.empty(plan.width)), nn.Parameter(torch.empty(plan.width))
        self.attention = TileAttention(plan)
        inner = plan.width * plan.config["decoder_ffn_mult"]
        self.feed_forward = FeedForward(plan.width, inner, plan.gate_first, plan.compute, bias=True)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Tokens [n, D] to tokens [n, D], float32."""
        x = x + self.attention(self.norm1(x).to(self.compute), rotary) * self.scale1
        return x + self.feed_forward(self.norm2(x).to(self.compute)) * self.scale2


class TileDecoder(nn.Module):
    """De-normalisation, `post_quant_conv` and the ViT decoder (spec/model.md 6.2).

    Matrix products inside attention and feed-forward are in the plan's compute dtype, all else is float32: the
    recommendation of the spec, nearer to the release than diffusers' own half precision.
    """

    def __init__(self, plan: TilePlan) -> None:
        super().__init__()
        self.plan = plan
        channels, registers = plan.dimensions.latent_channels, plan.config["decoder_num_register_tokens"]
        self.post_quant_conv = nn.Conv3d(channels, channels, 1)
        self.proj_in = nn.Linear(channels, plan.width)
        self.register_tokens = nn.Parameter(torch.empty(1, registers, plan.width))
        self.transformer_blocks = nn.ModuleList(TileBlock(plan) for _ in range(plan.config["decoder_num_layers"]))
        self.norm_out = nn.LayerNorm(plan.width, eps=plan.eps)
        self.proj_out = nn.Linear(plan.width, plan.config["out_channels"] * math.prod(plan.patch))

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised latents [1, channels, t, h, w] to ImageNet-normalised RGB [1, 3, 4 t, 16 h, 16 w]."""
        tokens = self._embed(latents)
        cells = tokens.shape[0]
        tokens = torch.cat([tokens, self.register_tokens.squeeze(0), tokens.new_zeros(1, self.plan.width)])
        rotary = self._rotary(tokens.shape[0] - cells)
        for block in self.transformer_blocks:
            tokens = block(tokens, rotary)
        return self._unpatch(self.proj_out(self.norm_out(tokens[:cells])))

    def _embed(self, latents: torch.Tensor) -> torch.Tensor:
        """One row for each cell, in (time, height, width) order; the 1x1x1 convolution is a linear map of rows."""
        rows = latents.flatten(2).squeeze(0).transpose(0, 1)
        std, mean = (torch.tensor(getattr(self.plan.dimensions, f"latents_{name}")) for name in ("std", "mean"))
        rows = linear(rows * std + mean, self.post_quant_conv.weight.flatten(1), self.post_quant_conv.bias)
        return self.proj_in(rows)

    def _rotary(self, appended: int) -> Rotary:
        """cos and sin of each token's angles [n, axes * frequencies]; appended tokens are at position 0."""
        frequencies = int(self.plan.head_dim * self.plan.config["decoder_rope_dim_ratio"]) // (2 * AXES)
        exponents = torch.arange(frequencies, dtype=torch.float32) / frequencies
        inverse = 1.0 / self.plan.config["decoder_rope_theta"] ** exponents
        grid = self.plan.grid
        angles = [
            self._angles(size, inverse).view(*(size if a == axis else 1 for a in range(AXES)), -1).expand(*grid, -1)
            for axis, size in enumerate(grid)
        ]
        table = torch.cat(angles, dim=-1).flatten(0, 2)
        table = torch.cat([table, table.new_zeros(appended, table.shape[-1])])
        return table.cos(), table.sin()

    @staticmethod
    def _angles(size: int, inverse: torch.Tensor) -> torch.Tensor:
        """Angles [size, frequencies] of one axis: positions are the cells' centres, from -1 to 1."""
        centres = 2.0 * (torch.arange(size, dtype=torch.float32) + 0.5) / size - 1.0
        return (2.0 * math.pi * centres).unsqueeze(-1) * inverse

    def _unpatch(self, patches: torch.Tensor) -> torch.Tensor:
        (t, h, w), (pt, ph, pw) = self.plan.grid, self.plan.patch
        pixels = patches.view(t, h, w, -1, pt, ph, pw).permute(3, 0, 4, 1, 5, 2, 6)
        return pixels.reshape(1, -1, t * pt, h * ph, w * pw)


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `video_decoder_tile` graph."""
    dimensions = checkpoint.dimensions.video_vae
    packed = checkpoint.qkv_layout("video_vae", partition)
    config = checkpoint.config("video_vae", partition)
    plan = TilePlan(dimensions, config, packed, gate_first=packed != "split", compute=compute)
    latents, frames = (
        (1, dimensions.latent_channels, *plan.grid),
        [n * p for n, p in zip(plan.grid, plan.patch, strict=True)],
    )
    graph = Graph(
        name="video_decoder_tile",
        module=lambda: TileDecoder(plan),
        inputs=(TensorSpec("latents", torch.float32, latents),),
        outputs=(TensorSpec("frames", torch.float32, (1, config["out_channels"], *frames)),),
        weights=(_weights(checkpoint.parameters("video_vae", partition), plan),),
        compute=compute,
        trials=({},),
    )
    return (graph,)


def _weights(parameters: Mapping[str, Weight], plan: TilePlan) -> dict[str, Weight]:
    names = ("proj_in.weight", "proj_in.bias", "norm_out.weight", "norm_out.bias", "proj_out.weight", "proj_out.bias")
    weights = {name: parameters[f"decoder.{name}"] for name in (*names, "register_tokens")}
    weights |= {name: parameters[name] for name in ("post_quant_conv.weight", "post_quant_conv.bias")}
    for index in range(plan.config["decoder_num_layers"]):
        block = f"transformer_blocks.{index}"
        for name, source in _block_sources(plan.qkv).items():
            weights[f"{block}.{name}"] = _as_stored(parameters[f"decoder.{block}.{source}"])
    return weights


def _block_sources(layout: QKVLayout) -> dict[str, str]:
    """A block's parameter names -> diffusers' parameter that is stored alone, or first in a packed tensor."""
    sources = {name: name for name in ("norm1.weight", "norm2.weight", "scale1", "scale2")}
    projections = {"query": "to_q", "key": "to_k", "value": "to_v"} if layout == "split" else {"qkv": "to_q"}
    for kind in ("weight", "bias"):
        sources |= {f"attention.project.{name}.{kind}": f"attn.{key}.{kind}" for name, key in projections.items()}
        sources[f"attention.out.{kind}"] = f"attn.to_out.0.{kind}"
        sources[f"feed_forward.gate_and_up.{kind}"] = f"ff.net.0.proj.{kind}"
        sources[f"feed_forward.down.{kind}"] = f"ff.net.2.{kind}"
    return sources


def _as_stored(weight: Weight) -> Stored:
    """The one tensor in the file that a parameter is all or part of."""
    (stored,) = {leaf.key: leaf for leaf in weight.leaves()}.values()
    return stored
