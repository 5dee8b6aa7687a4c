"""The SwiGLU feed-forward, for both orders in which a checkpoint stacks its gate and up halves."""

from __future__ import annotations

import torch
from torch import nn

from plugins.ops.swiglu import OP as SWIGLU


class FeedForward(nn.Module):
    """`down(up * silu(gate))` (spec/model.md 2.2); the first projection holds [gate; up] or [up; gate]."""

    def __init__(self, width: int, inner: int, gate_first: bool, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.gate_first = gate_first
        self.gate_and_up = nn.Linear(width, 2 * inner, bias=bias, dtype=dtype)
        self.down = nn.Linear(inner, width, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [S, D] to rows [S, D]."""
        first, second = self.gate_and_up(x).chunk(2, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        result: torch.Tensor = self.down(SWIGLU(gate, up))
        return result
