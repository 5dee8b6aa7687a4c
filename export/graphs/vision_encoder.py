"""The vision encoder, Qwen3-VL's: one picture a call, from flattened patches to rows of the language model.

What depends on the picture's grid (places in the table of positions, rotary angles) is computed by the caller, since
none of it can be traced (spec/export.md 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import embedding, gelu

from export.checkpoint.expressions import Weight
from export.graphs.attention import Projections, attend
from export.graphs.graph import Axis, Graph, TensorSpec
from plugins.dimensions import VisionDimensions

if TYPE_CHECKING:
    from export.checkpoint import Checkpoint

_MODEL = "model.visual"

CORNERS = 4
"""Entries of the table of positions that a patch's own position is interpolated from."""

MERGED_ROWS = Axis("merged_rows", 1, 16_384)
"""Rows of the language model; a picture of the processor's 16.8 million pixels has that many."""


class PatchEmbedding(nn.Module):
    """Patches and their interpolated positions; the latter are weighted in float32 as upstream does."""

    def __init__(self, dimensions: VisionDimensions, stored: torch.dtype, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute
        self.proj = nn.Linear(dimensions.patch_features, dimensions.hidden, dtype=compute)
        self.pos_embed = nn.Embedding(dimensions.position_grid**2, dimensions.hidden, dtype=stored)

    def forward(
        self, patches: torch.Tensor, position_indices: torch.Tensor, position_weights: torch.Tensor
    ) -> torch.Tensor:
        """Patches [n, features], places in the table and their weights, both [4, n], to hidden rows [n, vision]."""
        first, *others = (
            embedding(position_indices[corner], self.pos_embed.weight).float() * position_weights[corner].unsqueeze(-1)
            for corner in range(CORNERS)
        )
        positions = sum(others, start=first)
        return self.proj(patches.to(self.compute)) + positions.to(self.compute)


class VisionAttention(nn.Module):
    """Attention of all patches to all patches; queries and keys are rotated in float32."""

    def __init__(self, dimensions: VisionDimensions, compute: torch.dtype) -> None:
        super().__init__()
        heads, head_dim = dimensions.heads, dimensions.head_dim
        self.project = Projections(dimensions.hidden, heads, head_dim, "stacked", compute, bias=True)
        self.proj = nn.Linear(dimensions.hidden, dimensions.hidden, dtype=compute)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rows [n, vision] to rows [n, vision]; cos and sin are [n, head_dim], float32."""
        query, key, value = self.project(x)
        result: torch.Tensor = self.proj(attend(_rotate(query, cos, sin), _rotate(key, cos, sin), value))
        return result


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [n, heads, head_dim] by halves."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = wide * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
    return turned.to(x.dtype)


class VisionMLP(nn.Module):
    """Two layers with the tanh approximation of GELU between them."""

    def __init__(self, dimensions: VisionDimensions, compute: torch.dtype) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(dimensions.hidden, dimensions.intermediate, dtype=compute)
        self.linear_fc2 = nn.Linear(dimensions.intermediate, dimensions.hidden, dtype=compute)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [n, vision] to rows [n, vision]."""
        result: torch.Tensor = self.linear_fc2(gelu(self.linear_fc1(x), approximate="tanh"))
        return result


class VisionBlock(nn.Module):
    """One block, pre-norm (spec/model.md 7.1)."""

    def __init__(self, dimensions: VisionDimensions, compute: torch.dtype) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dimensions.hidden, eps=dimensions.norm_eps, dtype=compute)
        self.norm2 = nn.LayerNorm(dimensions.hidden, eps=dimensions.norm_eps, dtype=compute)
        self.attn = VisionAttention(dimensions, compute)
        self.mlp = VisionMLP(dimensions, compute)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Hidden [n, vision] to hidden [n, vision]."""
        hidden = hidden + self.attn(self.norm1(hidden), cos, sin)
        return hidden + self.mlp(self.norm2(hidden))


class Merger(nn.Module):
    """Joins the patches of each square into one row of the language model.

    `joined_norm`: patches are normalised after they are joined, as for deepstack, instead of each by itself.
    """

    def __init__(self, dimensions: VisionDimensions, joined_norm: bool, compute: torch.dtype) -> None:
        super().__init__()
        self.joined_norm, self.merged = joined_norm, dimensions.merged
        width = dimensions.hidden * dimensions.merged
        self.norm = nn.LayerNorm(width if joined_norm else dimensions.hidden, eps=dimensions.norm_eps, dtype=compute)
        self.linear_fc1 = nn.Linear(width, width, dtype=compute)
        self.linear_fc2 = nn.Linear(width, dimensions.out_hidden, dtype=compute)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [n, vision], four consecutive rows a square, to rows [n / 4, text]."""
        rows = self.norm(self._join(hidden)) if self.joined_norm else self._join(self.norm(hidden))
        result: torch.Tensor = self.linear_fc2(gelu(self.linear_fc1(rows)))
        return result

    def _join(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.unflatten(0, (-1, self.merged)).flatten(1)


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The graphs `vision_encoder.embed`, `.block` (an instance a block), `.deepstack` (one a tap) and `.merger`."""
    build = _Builder(checkpoint.dimensions.vision, checkpoint.parameters("text_encoder", partition), compute)
    return build.embed(), build.block(), build.deepstack(), build.merger()


class _Builder:
    def __init__(self, dimensions: VisionDimensions, parameters: Mapping[str, Weight], compute: torch.dtype) -> None:
        self._dimensions, self._parameters, self._compute = dimensions, parameters, compute
        merged = dimensions.merged
        self._rows = Axis("vision_rows", merged, merged * MERGED_ROWS.maximum, multiple=merged)
        self._trials = tuple({"vision_rows": merged * rows, "merged_rows": rows} for rows in (1, 6))

    def embed(self) -> Graph:
        size, compute = self._dimensions, self._compute
        weights = self._under("patch_embed.") | self._under("", "pos_embed.weight")
        filters = weights["proj.weight"]
        table = weights["pos_embed.weight"]
        corners = (CORNERS, self._rows)
        return Graph(
            name="vision_encoder.embed",
            module=lambda: PatchEmbedding(size, table.dtype, compute),
            inputs=(
                TensorSpec("patches", torch.float32, (self._rows, size.patch_features)),
                TensorSpec("position_indices", torch.int64, corners, below=size.position_grid**2),
                TensorSpec("position_weights", torch.float32, corners),
            ),
            outputs=(self._hidden("hidden"),),
            # Without overlap the convolution over a picture is a linear map of its patches.
            weights=(weights | {"proj.weight": filters.view(size.hidden, size.patch_features)},),
            compute=compute,
            trials=self._trials,
        )

    def block(self) -> Graph:
        size, compute = self._dimensions, self._compute
        angles = (self._rows, size.head_dim)
        return Graph(
            name="vision_encoder.block",
            module=lambda: VisionBlock(size, compute),
            inputs=(
                self._hidden("hidden"),
                TensorSpec("cos", torch.float32, angles),
                TensorSpec("sin", torch.float32, angles),
            ),
            outputs=(self._hidden("hidden_out"),),
            weights=tuple(_named(self._under(f"blocks.{i}.")) for i in range(size.depth)),
            compute=compute,
            trials=self._trials,
        )

    def deepstack(self) -> Graph:
        weights = [self._under(f"deepstack_merger_list.{i}.") for i in range(len(self._dimensions.deepstack))]
        return self._merger("vision_encoder.deepstack", weights, joined_norm=True)

    def merger(self) -> Graph:
        return self._merger("vision_encoder.merger", [self._under("merger.")], joined_norm=False)

    def _merger(self, name: str, weights: list[dict[str, Weight]], joined_norm: bool) -> Graph:
        size, compute = self._dimensions, self._compute
        return Graph(
            name=name,
            module=lambda: Merger(size, joined_norm, compute),
            inputs=(self._hidden("hidden"),),
            outputs=(TensorSpec("rows", compute, (MERGED_ROWS, size.out_hidden)),),
            weights=tuple(weights),
            compute=compute,
            trials=self._trials,
        )

    def _hidden(self, name: str) -> TensorSpec:
        return TensorSpec(name, self._compute, (self._rows, self._dimensions.hidden))

    def _under(self, prefix: str, start: str = "") -> dict[str, Weight]:
        """The vision tower's parameters under a prefix, without it."""
        whole = f"{_MODEL}.{prefix}"
        return {n.removeprefix(whole): w for n, w in self._parameters.items() if n.startswith(whole + start)}


def _named(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The packed projection under the name that it has here."""
    return {name.replace("attn.qkv.", "attn.project.qkv."): weight for name, weight in weights.items()}
