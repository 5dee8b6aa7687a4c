"""RMSNorm followed by a scale and a shift that each row takes from a small table (indexed AdaLN modulation)."""

from __future__ import annotations

import torch

from plugins.op import Fast, Op


def reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm(x) * weight * (1 + scale[index]) + shift[index]`.

    x [S, D]; weight [D]; scale and shift [rows, D]; index [S] int64; returns [S, D] in x's dtype. Half precisions are
    computed in float32 and rounded once, at the end.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    value = value * (1 + scale.to(wide)).index_select(0, index) + shift.to(wide).index_select(0, index)
    return value.to(x.dtype)


def fake(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, eps: float
) -> torch.Tensor:
    """A result with x's shape and dtype."""
    return torch.empty_like(x)


def kernel(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, eps: float
) -> torch.Tensor:
    """A kernel in the Triton language, for calls outside a compiled graph; rows may lie apart. Float32 at most."""
    from plugins.kernels import rows

    if x.dtype == torch.float64:
        return reference(x, weight, scale, shift, index, eps)

    return rows.modulated_rms_norm(x, weight, scale, shift, index, eps)


# The table has few rows: it is widened before its rows are gathered.
SHIFTED = """
    wide_x = Cast <to = 1> (x)
    wide_weight = Cast <to = 1> (weight)
    wide_scale = Cast <to = 1> (scale)
    wide_shift = Cast <to = 1> (shift)
    one = Constant <value_float = 1.0> ()
    factor = Add (wide_scale, one)
    normed = RMSNormalization <axis = -1, epsilon: float = @eps> (wide_x, wide_weight)
    row_factor = Gather <axis = 0> (factor, index)
    row_shift = Gather <axis = 0> (wide_shift, index)
    scaled = Mul (normed, row_factor)
    shifted = Add (scaled, row_shift)
"""
"""Statements that make the result in float32, `shifted`."""

BODY = SHIFTED + "    result = CastLike (shifted, x)\n"

# After a gated residual torch.compile makes one kernel of both: 0.80 ms of a bfloat16 block (bench/results/block.json).
OP = Op("modulated_rms_norm", reference, fake, BODY, fast=(Fast("cuda", kernel, minimum=(8, 9)),), fused=True)
