"""Dense bidirectional attention among the first rows of a buffer that has more: a shape bucket, padded."""

from __future__ import annotations

import torch

from plugins.kernels.hopper_attention import ABOVE, BFLOAT16, CAPABILITY, attend, serves
from plugins.op import Fast, Op
from plugins.ops.attention_tiles import LOWEST, MIXED, SCORES, VALID, laid_out, result_shapes, valid_column, valid_only


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid_rows: torch.Tensor, scale: float
) -> torch.Tensor:
    """`softmax(scale * query @ key^T) @ value` over the first `valid_rows` rows; zeros in the others.

    query, key and value [B, H, S, d]; valid_rows [1] int64, at least 1; returns [B, H, S, d] in the query's dtype.
    What padding rows hold is never read into a sum: it may be NaN.
    """
    valid = valid_column(query, valid_rows)
    query_wide, key_wide, value_wide = (valid_only(x, valid) for x in (query, key, value))
    scores = torch.where(valid.T, query_wide @ key_wide.mT * scale, LOWEST)
    return laid_out(torch.where(valid, scores.softmax(-1) @ value_wide, 0), query)


def fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid_rows: torch.Tensor, scale: float
) -> torch.Tensor:
    """A result with the query's shape, dtype and layout."""
    return torch.empty_like(query)


def hopper(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid_rows: torch.Tensor, scale: float
) -> torch.Tensor:
    """The kernel for Hopper, which reads `valid_rows` on the device."""
    if not serves(query, key, value):
        return reference(query, key, value, valid_rows, scale)
    dense = torch.zeros(1, device=query.device)
    return attend(BFLOAT16, query, key, value, valid_rows, dense, scale)[0]


BODY = (
    VALID
    + SCORES.format(query="wide_query", key="wide_key")
    + "    total = ReduceSum <keepdims = 1> (all_weights, last_axis)\n"
    + MIXED.format(weights="all_weights", value="wide_value")
)


OP = Op(
    "dense_attention",
    reference,
    fake,
    BODY,
    fast=(Fast("cuda", hopper, minimum=CAPABILITY, below=ABOVE),),
    plugin_shapes=lambda *given: result_shapes(*given)[:1],
)
