"""RMSNorm of each head and the rotation of its leading channels: what queries and keys go through before attention."""

from __future__ import annotations

import torch

from plugins.kernels import norm_rotary as rotate
from plugins.op import Fast, Op


def reference(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, rotated: int
) -> torch.Tensor:
    """`rotate(rms_norm(x) * weight)`: the first `rotated` channels turn by halves, the others pass through.

    x [S, H, d]; weight [d]; cos and sin [S, rotated / 2], of all three axes of a row's position side by side; returns
    [S, H, d] contiguous, in x's dtype, the layout that attention reads. The angles are rounded to x's dtype before use,
    as upstream does (diffusers' `_apply_rotary_emb`); all else is computed in float32 and rounded once, at the end.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    angle_cos, angle_sin = (table.to(x.dtype).to(wide).unsqueeze(1) for table in (cos, sin))
    first, second = value[..., :rotated].chunk(2, dim=-1)
    turned = first * angle_cos - second * angle_sin, second * angle_cos + first * angle_sin
    return torch.cat([*turned, value[..., rotated:]], dim=-1).to(x.dtype)


def fake(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, rotated: int
) -> torch.Tensor:
    """A contiguous result with x's shape and dtype."""
    return x.new_empty(x.shape)


def kernel(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, rotated: int
) -> torch.Tensor:
    """A kernel of its own, which reads and writes its rows once; what it does not serve goes the reference's way."""
    if not rotate.serves(x, weight, cos, sin) or rotated != 2 * cos.shape[-1]:
        return reference(x, weight, cos, sin, eps, rotated)
    return rotate.norm_rotary(x, weight, cos, sin, eps)


# TensorRT has one layer for the rotation, which wants heads before rows.
BODY = """
    normed = RMSNormalization <axis = -1, epsilon: float = @eps> (x, weight)
    heads_first = Transpose <perm = [1, 0, 2]> (normed)
    zero = Constant <value_ints = [0]> ()
    batch = Unsqueeze (heads_first, zero)
    narrow_cos = CastLike (cos, x)
    narrow_sin = CastLike (sin, x)
    batch_cos = Unsqueeze (narrow_cos, zero)
    batch_sin = Unsqueeze (narrow_sin, zero)
    turned = RotaryEmbedding <rotary_embedding_dim: int = @rotated> (batch, batch_cos, batch_sin)
    turned_heads = Squeeze (turned, zero)
    result = Transpose <perm = [1, 0, 2]> (turned_heads)
"""

OP = Op("norm_rotary", reference, fake, BODY, fast=(Fast("cuda", kernel, minimum=rotate.CAPABILITY),))
