"""What attention over query tiles and key tiles shares: rows that are valid, tiles that are skipped, and their softmax.

The tile rule is that of BLASST (arXiv 2512.12087; spec/contract.md 4.3): a tile of keys adds nothing to a tile of
queries if in every row its largest weight, relative to the largest of the tiles before it, is below a threshold. With
a threshold of at most 1 such a tile cannot hold a row's maximum, so the running maximum is that of all tiles before,
skipped or not, and every decision can be made from the tiles' maxima.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

LOWEST = -3.0e38
"""Score of a key that is not attended to: finite, so that differences of scores are never NaN."""


def valid_column(x: torch.Tensor, valid_rows: torch.Tensor) -> torch.Tensor:
    """Whether each row of x [B, H, S, d] is among the first `valid_rows` [1] int64: bool [S, 1]."""
    return (torch.arange(x.shape[-2], device=x.device) < valid_rows.to(x.device)).unsqueeze(-1)


def valid_only(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, d] in float32 at least, with zeros in the rows that are not `valid` [S, 1], whatever they hold."""
    return torch.where(valid, x.to(torch.promote_types(x.dtype, torch.float32)), 0)


def tile_weights(
    scores: torch.Tensor, valid: torch.Tensor, threshold: torch.Tensor, query_tile: int, key_tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights relative to their row's largest, with zeros in skipped tiles; and how many tiles were skipped.

    scores [B, H, S, S], already scaled; valid [S, 1]; threshold [1], in [0, 1], 0 skips nothing. Returns weights
    [B, H, S, S] and counts [B, H] int64, of tiles with at least one valid query and one valid key.
    """
    scores = torch.where(valid.T, scores, LOWEST)
    skipped = _skipped(scores, valid, threshold, query_tile, key_tile)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    spread = skipped.repeat_interleave(query_tile, -2).repeat_interleave(key_tile, -1)
    kept = torch.where(spread[..., : scores.shape[-2], : scores.shape[-1]], 0, weights)
    real = valid[::query_tile] & valid[::key_tile].T
    return kept, (skipped & real).sum((-2, -1))


def _skipped(
    scores: torch.Tensor, valid: torch.Tensor, threshold: torch.Tensor, query_tile: int, key_tile: int
) -> torch.Tensor:
    """Whether each tile is skipped: bool [B, H, query tiles, key tiles]."""
    rows = scores.shape[-1]
    maxima = pad(scores, (0, -rows % key_tile), value=LOWEST).unflatten(-1, (-1, key_tile)).amax(-1)
    before = pad(maxima.cummax(-1).values[..., :-1], (1, 0), value=LOWEST)
    low = (torch.exp(maxima - before) < threshold.to(scores)) | ~valid
    return pad(low, (0, 0, 0, -rows % query_tile), value=True).unflatten(-2, (-1, query_tile)).all(-2)


def laid_out(result: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The result in the query's dtype and layout, which is what fakes promise."""
    return torch.empty_like(query).copy_(result)


def fake(query: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    """A result with the query's shape, dtype and layout, and its counts [B, H] int64."""
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.int64)


def result_shapes(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Sizes of an attention's result and of its counts, from those of its inputs [B, H, S, d]."""
    sizes = list(inputs[0])
    return sizes, sizes[:2]


VALID = """
    rows = Shape <start = 2, end = 3> (query)
    no_axes = Constant <value_ints = [0]> ()
    row_count = Squeeze (rows, no_axes)
    first = Constant <value = int64 {0}> ()
    next = Constant <value = int64 {1}> ()
    positions = Range (first, row_count, next)
    valid = Less (positions, valid_rows)
    last_axis = Constant <value_ints = [-1]> ()
    valid_column = Unsqueeze (valid, last_axis)
    zero = Constant <value = float {0.0}> ()
    typed_query = Cast <to = 1> (query)
    typed_key = Cast <to = 1> (key)
    typed_value = Cast <to = 1> (value)
    wide_query = Where (valid_column, typed_query, zero)
    wide_key = Where (valid_column, typed_key, zero)
    wide_value = Where (valid_column, typed_value, zero)
"""
"""Statements that make `valid` [S], `valid_column` [S, 1], and float32 inputs with zeros in padding rows."""

SCORES = """
    turned_key = Transpose <perm = [0, 1, 3, 2]> ({key})
    products = MatMul ({query}, turned_key)
    factor = Constant <value_float: float = @scale> ()
    all_scores = Mul (products, factor)
    lowest = Constant <value_float = -3.0e38> ()
    scores = Where (valid, all_scores, lowest)
    row_maximum = ReduceMax <keepdims = 1> (scores, last_axis)
    below = Sub (scores, row_maximum)
    all_weights = Exp (below)
"""
"""Statements from two names of tensors [B, H, S, d] to `scores` and `all_weights` [B, H, S, S]."""

# ONNX has no cumulative maximum: each tile's maxima are compared with those of the tiles before it, under a triangle.
SKIPPED = """
    query_tile_count = Constant <value_int: int = @query_tile> ()
    key_tile_count = Constant <value_int: int = @key_tile> ()
    query_tile_size = Unsqueeze (query_tile_count, no_axes)
    key_tile_size = Unsqueeze (key_tile_count, no_axes)
    minus_rows = Neg (rows)
    missing_keys = Mod (minus_rows, key_tile_size)
    missing_queries = Mod (minus_rows, query_tile_size)
    width_axis = Constant <value_ints = [3]> ()
    height_axis = Constant <value_ints = [2]> ()
    nothing = Constant <value_ints = [0]> ()
    key_padding = Concat <axis = 0> (nothing, missing_keys)
    padded_scores = Pad (scores, key_padding, lowest, width_axis)
    whole = Constant <value_ints = [0, 0, 0, -1]> ()
    by_key_tile = Concat <axis = 0> (whole, key_tile_size)
    tiled_scores = Reshape (padded_scores, by_key_tile)
    maxima = ReduceMax <keepdims = 0> (tiled_scores, last_axis)
    key_tiles = Shape <start = 3, end = 4> (maxima)
    key_tile_number = Squeeze (key_tiles, no_axes)
    tile_index = Range (first, key_tile_number, next)
    tile_column = Unsqueeze (tile_index, last_axis)
    is_before = Less (tile_index, tile_column)
    row_axis = Constant <value_ints = [-2]> ()
    maxima_row = Unsqueeze (maxima, row_axis)
    maxima_before = Where (is_before, maxima_row, lowest)
    before = ReduceMax <keepdims = 0> (maxima_before, last_axis)
    distance = Sub (maxima, before)
    ratio = Exp (distance)
    is_low = Less (ratio, threshold)
    is_padding = Not (valid_column)
    votes = Or (is_low, is_padding)
    counted_votes = Cast <to = 1> (votes)
    one_vote = Constant <value = float {1.0}> ()
    query_padding = Concat <axis = 0> (nothing, missing_queries)
    padded_votes = Pad (counted_votes, query_padding, one_vote, height_axis)
    two_copied = Constant <value_ints = [0, 0, -1]> ()
    by_query_tile = Concat <axis = 0> (two_copied, query_tile_size, key_tiles)
    tiled_votes = Reshape (padded_votes, by_query_tile)
    skipped_tiles = ReduceMin <keepdims = 0> (tiled_votes, width_axis)
    query_tile_of_row = Div (positions, query_tile_size)
    key_tile_of_row = Div (positions, key_tile_size)
    skipped_rows = Gather <axis = 2> (skipped_tiles, query_tile_of_row)
    skipped_elements = Gather <axis = 3> (skipped_rows, key_tile_of_row)
    kept = Sub (one_vote, skipped_elements)
    weights = Mul (all_weights, kept)
    total = ReduceSum <keepdims = 1> (weights, last_axis)

    query_tiles = Shape <start = 2, end = 3> (skipped_tiles)
    query_tile_number = Squeeze (query_tiles, no_axes)
    query_tile_index = Range (first, query_tile_number, next)
    query_tile_start = Mul (query_tile_index, query_tile_size)
    key_tile_start = Mul (tile_index, key_tile_size)
    real_queries = Less (query_tile_start, valid_rows)
    real_keys = Less (key_tile_start, valid_rows)
    real_query_column = Unsqueeze (real_queries, last_axis)
    real_tiles = And (real_query_column, real_keys)
    real_tiles_float = Cast <to = 1> (real_tiles)
    real_skipped = Mul (skipped_tiles, real_tiles_float)
    both_axes = Constant <value_ints = [2, 3]> ()
    skipped_float = ReduceSum <keepdims = 0> (real_skipped, both_axes)
    skipped = Cast <to = 7> (skipped_float)
"""
"""Statements that make `weights` [B, H, S, S], their `total` by row, and `skipped` [B, H] int64."""

MIXED = """
    sums = MatMul ({weights}, {value})
    mixed = Div (sums, total)
    valid_mixed = Where (valid_column, mixed, zero)
    result = CastLike (valid_mixed, query)
"""
"""Statements from two names, of weights [B, H, S, S] and of values [B, H, S, d], to `result`."""
