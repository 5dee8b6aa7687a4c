"""The product of a SwiGLU feed-forward's two halves."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from plugins.op import Op


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`up * silu(gate)` (arXiv 2002.05202): gate and up [S, F], which may be halves of wider rows; returns [S, F]."""
    return up * silu(gate)


def fake(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A contiguous result with the gate's shape and dtype."""
    return gate.new_empty(gate.shape)


BODY = """
    open = Sigmoid (gate)
    activated = Mul (gate, open)
    result = Mul (up, activated)
"""

OP = Op("swiglu", reference, fake, BODY)
