"""The product of a SwiGLU feed-forward's two halves."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from plugins.op import Fast, Op


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`up * silu(gate)` (arXiv 2002.05202): gate and up [S, F], which may be halves of wider rows; returns [S, F]."""
    return up * silu(gate)


def fake(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A contiguous result with the gate's shape and dtype."""
    return gate.new_empty(gate.shape)


def kernel(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A kernel in the Triton language, for calls outside a compiled graph."""
    from plugins.kernels import rows

    if gate.dtype == torch.float64:
        return reference(gate, up)

    return rows.swiglu(gate, up)


BODY = """
    open = Sigmoid (gate)
    activated = Mul (gate, open)
    result = Mul (up, activated)
"""

# torch.compile is as fast (bench/results/rows.json); rows that an FP8 linear reads are `quantised_rows.SWIGLU`.
OP = Op("swiglu", reference, fake, BODY, fast=(Fast("cuda", kernel, minimum=(8, 9)),), fused=True)
