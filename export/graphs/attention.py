"""Self-attention over packed rows, for each way that a checkpoint packs the query, key and value projections."""

from __future__ import annotations

import torch
from torch import nn

from export.checkpoint.recipes import QKVLayout
from plugins.dimensions import DenoiserDimensions
from plugins.ops.attention import OP as ATTENTION

Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [S, half], float32: angles of the leading 2 x half channels of every head."""


class SelfAttention(nn.Module):
    """Bidirectional attention with RMS-normed queries and keys (spec/model.md 2.2).

    A packed projection is used as it lies in the file; its layout is undone on the activations, which are views.
    """

    def __init__(self, dimensions: DenoiserDimensions, layout: QKVLayout, compute: torch.dtype) -> None:
        super().__init__()
        self.layout = layout
        self.heads, self.head_dim = dimensions.heads, dimensions.head_dim
        names = ("query", "key", "value") if layout == "split" else ("qkv",)
        width = 3 * dimensions.inner // len(names)
        self.project = nn.ModuleDict(
            {name: nn.Linear(dimensions.hidden, width, bias=False, dtype=compute) for name in names}
        )
        self.query_norm = nn.RMSNorm(dimensions.head_dim, eps=dimensions.qk_norm_eps, dtype=compute)
        self.key_norm = nn.RMSNorm(dimensions.head_dim, eps=dimensions.qk_norm_eps, dtype=compute)
        self.out = nn.Linear(dimensions.inner, dimensions.hidden, bias=False, dtype=compute)
        # TensorRT has no fused kernel for float32, nor for a single head.
        self.decomposable = int(compute == torch.float32 or dimensions.heads == 1)

    def forward(self, x: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Rows [S, D] to rows [S, D]."""
        query, key, value = self._project(x)
        query = rotate(_heads_first(self.query_norm(query)), rotary)
        key = rotate(_heads_first(self.key_norm(key)), rotary)
        result = ATTENTION(query, key, _heads_first(value), self.head_dim**-0.5, self.decomposable)
        return self.out(result.squeeze(0).transpose(0, 1).flatten(1))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key and value, each [S, heads, head_dim]."""
        if self.layout == "split":
            return tuple(layer(x).unflatten(-1, (self.heads, -1)) for layer in self.project.values())
        qkv = self.project["qkv"](x)
        if self.layout == "stacked":
            return tuple(part.unflatten(-1, (self.heads, -1)) for part in qkv.chunk(3, dim=-1))
        return qkv.unflatten(-1, (self.heads, 3 * self.head_dim)).chunk(3, dim=-1)


def rotate(x: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Rotates the leading channels of x [1, heads, S, head_dim] by halves; the rest pass through.

    The angles' cos and sin are rounded to x's dtype for use, as upstream does.
    """
    if rotary is None:
        return x
    cos, sin = (table.to(x.dtype).unsqueeze(0) for table in rotary)
    return torch.onnx.ops.rotary_embedding(x, cos, sin, rotary_embedding_dim=2 * cos.shape[-1])


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)
