"""A residual sum whose update is gated by a row of a small table."""

from __future__ import annotations

import torch

from plugins.op import Fast, Op


def reference(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`x + gate[index] * update`.

    x and update [S, D]; gate [rows, D]; index [S] int64; returns [S, D] in x's dtype.
    """
    return x + gate.index_select(0, index) * update


def fake(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A result with x's shape and dtype."""
    return x.new_empty(x.shape)


def kernel(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A kernel in the Triton language, for calls outside a compiled graph, of contiguous rows."""
    from plugins.kernels import rows

    if x.dtype == torch.float64:
        return reference(x, update, gate, index)

    return rows.gated_residual(x, update, gate, index)


BODY = """
    row_gate = Gather <axis = 0> (gate, index)
    gated = Mul (row_gate, update)
    result = Add (x, gated)
"""

# With the norm after it torch.compile makes one kernel of both (see modulated_rms_norm).
OP = Op("gated_residual", reference, fake, BODY, fast=(Fast("cuda", kernel, minimum=(8, 9)),), fused=True)
