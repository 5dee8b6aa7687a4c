"""Attention that leaves out key tiles which add next to nothing, with a threshold that is given at run time."""

from __future__ import annotations

import torch

from plugins.kernels.hopper_attention import ABOVE, BFLOAT16, CAPABILITY, QUERY_TILE, attend, serves
from plugins.op import Fast, Op
from plugins.ops.attention_tiles import (
    MIXED,
    SCORES,
    SKIPPED,
    VALID,
    fake,
    laid_out,
    result_shapes,
    tile_weights,
    valid_column,
    valid_only,
)

RESULTS = ("result", "skipped")


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid_rows: torch.Tensor,
    threshold: torch.Tensor,
    scale: float,
    query_tile: int,
    key_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention among the first `valid_rows` rows without the tiles that `attention_tiles` skips.

    query, key and value [B, H, S, d]; valid_rows [1] int64, at least 1; threshold [1] float32 in [0, 1], where 0 makes
    it dense; tiles are of `query_tile` rows and `key_tile` keys. Returns the result [B, H, S, d] in the query's dtype,
    with zeros in padding rows, and the number of skipped tiles [B, H] int64. Source: BLASST (arXiv 2512.12087).
    """
    valid = valid_column(query, valid_rows)
    query_wide, key_wide, value_wide = (valid_only(x, valid) for x in (query, key, value))
    scores = query_wide @ key_wide.mT * scale
    weights, skipped = tile_weights(scores, valid, threshold, query_tile, key_tile)
    mixed = weights @ value_wide / weights.sum(-1, keepdim=True)
    return laid_out(torch.where(valid, mixed, 0), query), skipped


def hopper(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid_rows: torch.Tensor,
    threshold: torch.Tensor,
    scale: float,
    query_tile: int,
    key_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel for Hopper, if the tiles are its own."""
    if not serves(query, key, value) or (query_tile, key_tile) != (QUERY_TILE, BFLOAT16.keys):
        return reference(query, key, value, valid_rows, threshold, scale, query_tile, key_tile)
    return attend(BFLOAT16, query, key, value, valid_rows, threshold, scale)


BODY = (
    VALID
    + SCORES.format(query="wide_query", key="wide_key")
    + SKIPPED
    + MIXED.format(weights="weights", value="wide_value")
)


OP = Op(
    "skip_softmax_attention",
    reference,
    fake,
    BODY,
    results=RESULTS,
    fast=(Fast("cuda", hopper, minimum=CAPABILITY, below=ABOVE),),
    plugin_shapes=result_shapes,
)
