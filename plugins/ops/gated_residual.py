"""A residual sum whose update is gated by a row of a small table."""

from __future__ import annotations

import torch

from plugins.op import Op


def reference(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`x + gate[index] * update`.

    x and update [S, D]; gate [rows, D]; index [S] int64; returns [S, D] in x's dtype.
    """
    return x + gate.index_select(0, index) * update


def fake(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A result with x's shape and dtype."""
    return x.new_empty(x.shape)


BODY = """
    row_gate = Gather <axis = 0> (gate, index)
    gated = Mul (row_gate, update)
    result = Add (x, gated)
"""

OP = Op("gated_residual", reference, fake, BODY)
