"""Self-attention over packed rows, for each way that a checkpoint packs the query, key and value projections."""

from __future__ import annotations

import torch
from torch import nn

from export.checkpoint.recipes import QKVLayout
from plugins.dimensions import DenoiserDimensions
from plugins.ops.attention import OP as ATTENTION
from plugins.ops.norm_rotary import OP as NORM_ROTARY
from plugins.ops.video_sparse_attention import OP as VIDEO_SPARSE_ATTENTION

Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [S, half], float32: angles of the leading 2 x half channels of every head."""


class Projections(nn.ModuleDict):
    """The query, key and value projections of rows, as a checkpoint packs them: three layers, or one named `qkv`.

    A packed projection is used as it lies in the file; its layout is undone on the activations, which are views.
    """

    def __init__(
        self, width: int, heads: int, head_dim: int, layout: QKVLayout, dtype: torch.dtype, bias: bool = False
    ) -> None:
        names = ("query", "key", "value") if layout == "split" else ("qkv",)
        outputs = 3 * heads * head_dim // len(names)
        super().__init__({name: nn.Linear(width, outputs, bias=bias, dtype=dtype) for name in names})
        self.layout, self.heads, self.head_dim = layout, heads, head_dim

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows [S, D] to query, key and value, each [S, heads, head_dim]."""
        if self.layout == "split":
            return tuple(layer(x).unflatten(-1, (self.heads, -1)) for layer in self.values())
        qkv = self["qkv"](x)
        if self.layout == "stacked":
            return tuple(part.unflatten(-1, (self.heads, -1)) for part in qkv.chunk(3, dim=-1))
        return qkv.unflatten(-1, (self.heads, 3 * self.head_dim)).chunk(3, dim=-1)


class AttentionInputs(nn.Module):
    """What attention takes of rows: projected queries, keys and values, the first two RMS-normed and rotated."""

    def __init__(self, dimensions: DenoiserDimensions, layout: QKVLayout, compute: torch.dtype) -> None:
        super().__init__()
        self.project = Projections(dimensions.hidden, dimensions.heads, dimensions.head_dim, layout, compute)
        self.query_norm = nn.RMSNorm(dimensions.head_dim, eps=dimensions.qk_norm_eps, dtype=compute)
        self.key_norm = nn.RMSNorm(dimensions.head_dim, eps=dimensions.qk_norm_eps, dtype=compute)
        self.eps = dimensions.qk_norm_eps

    def inputs(self, x: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, ...]:
        """Rows [S, D] to query, key and value, each [S, heads, head_dim]; a row's depend on that row alone."""
        query, key, value = self.project(x)
        return self._normed(self.query_norm, query, rotary), self._normed(self.key_norm, key, rotary), value

    def _normed(self, norm: nn.RMSNorm, x: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        if rotary is None:
            return norm(x)
        cos, sin = rotary
        return NORM_ROTARY(x, norm.weight, cos, sin, self.eps, 2 * cos.shape[-1])


class GatedInputs(AttentionInputs):
    """The same, and a gate: a projection of the same rows that is neither normed nor rotated (spec/model.md 8.3)."""

    def __init__(self, dimensions: DenoiserDimensions, layout: QKVLayout, compute: torch.dtype) -> None:
        super().__init__(dimensions, layout, compute)
        self.gate = nn.Linear(dimensions.hidden, dimensions.inner, bias=False, dtype=compute)

    def inputs(self, x: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, ...]:
        """Rows [S, D] to query, key, value and gate, each [S, heads, head_dim]."""
        query, key, value = super().inputs(x, rotary)
        return query, key, value, self.gate(x).unflatten(-1, query.shape[1:])


class AttentionOutput(nn.Module):
    """The projection of what attention has mixed."""

    def __init__(self, dimensions: DenoiserDimensions, compute: torch.dtype) -> None:
        super().__init__()
        self.out = nn.Linear(dimensions.inner, dimensions.hidden, bias=False, dtype=compute)

    def forward(self, mixed: torch.Tensor) -> torch.Tensor:
        """Mixed values [S, heads * head_dim] to rows [S, D]."""
        result: torch.Tensor = self.out(mixed)
        return result


class SelfAttention(AttentionInputs):
    """Bidirectional attention with RMS-normed queries and keys (spec/model.md 2.2), without rotation."""

    def __init__(self, dimensions: DenoiserDimensions, layout: QKVLayout, compute: torch.dtype) -> None:
        super().__init__(dimensions, layout, compute)
        self.out = nn.Linear(dimensions.inner, dimensions.hidden, bias=False, dtype=compute)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [S, D] to rows [S, D]."""
        return self.out(attend(*self.inputs(x, None)))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Bidirectional attention over all rows: three of [S, heads, head_dim] to [S, heads * head_dim].

    TensorRT has no fused kernel for float32, nor for a single head, and is told that it may do without one there.
    """
    heads, head_dim = query.shape[1:]
    decomposable = int(query.dtype == torch.float32 or heads == 1)
    query, key, value = (_heads_first(x) for x in (query, key, value))
    result = ATTENTION(query, key, value, head_dim**-0.5, decomposable)
    return result.squeeze(0).transpose(0, 1).flatten(1)


def attend_to_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    tile_rows: torch.Tensor,
    row_tiles: torch.Tensor,
    tile_counts: torch.Tensor,
) -> torch.Tensor:
    """Attention to the most relevant video tiles: four of [S, heads, head_dim] to [S, heads * head_dim].

    The tiles are as `plugins.ops.video_sparse_attention` takes them.
    """
    scale = query.shape[-1] ** -0.5
    heads = (_heads_first(x) for x in (query, key, value, gate))
    result = VIDEO_SPARSE_ATTENTION(*heads, tile_rows, row_tiles, tile_counts, scale)
    return result.squeeze(0).transpose(0, 1).flatten(1)


def rotate(x: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Rotates the leading channels of x [S, heads, head_dim] by halves; the rest pass through.

    The angles' cos and sin are rounded to x's dtype for use, as upstream does.
    """
    if rotary is None:
        return x
    cos, sin = (table.to(x.dtype).unsqueeze(0) for table in rotary)
    rotated = torch.onnx.ops.rotary_embedding(_heads_first(x), cos, sin, rotary_embedding_dim=2 * cos.shape[-1])
    return rotated.squeeze(0).transpose(0, 1)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)
