"""SAGE attention: 8-bit floats with block scales in both products, keys smoothed by their mean; may skip tiles as well.

Source: SageAttention (arXiv 2410.02367) and SageAttention2 (arXiv 2411.10958) for smoothing and granularity; scales,
floor and the static scale of the weights as in spec/contract.md 4.2.
"""

from __future__ import annotations

import warnings

import torch
from torch.nn.functional import pad

from plugins.kernels.hopper_attention import ABOVE, BFLOAT16, CAPABILITY, QUERY_TILE, SAGE, attend, serves
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
from plugins.ops.fp8_linear import E4M3, E4M3_MAX
from plugins.ops.skip_softmax_attention import RESULTS

AMAX_FLOOR = 1e-3
"""Least magnitude that a scale maps to 448, so that a block of zeros gives zeros (spec/contract.md 4.2)."""

WEIGHT_SCALE = 256.0
"""What the largest weight of a row is stored as: a power of two, which an exponent takes for nothing."""

WHOLE = 0
"""A block of all rows: one scale for each head."""


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid_rows: torch.Tensor,
    threshold: torch.Tensor,
    scale: float,
    query_block: int,
    key_block: int,
    query_tile: int,
    key_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention among the first `valid_rows` rows with queries, keys, values and weights rounded to E4M3.

    query, key and value [B, H, S, d]; valid_rows [1] int64, at least 1; threshold [1] float32 in [0, 1], where 0 skips
    no tile; `query_block` and `key_block` are rows that share a scale, 0 for all of a head's; values have a scale for
    each channel. Keys lose their mean over the valid rows first, which the softmax does not see. Returns the result
    [B, H, S, d] in the query's dtype, zeros in padding rows, and the number of skipped tiles [B, H] int64. Padding is
    never quantised. Fewer rows than a block of keys are computed without rounding, with a warning.
    """
    valid = valid_column(query, valid_rows)
    query_wide, key_wide, value_wide = (valid_only(x, valid) for x in (query, key, value))
    short = is_short(key, key_block)
    if not short:
        query_wide = rounded(query_wide, block_scales(query_wide, query_block))
        key_wide = smooth(key_wide, valid, valid_rows)
        key_wide = rounded(key_wide, block_scales(key_wide, key_block))
        value_wide = rounded(value_wide, scales(value_wide.abs().amax(-2, keepdim=True)))
    scores = query_wide @ key_wide.mT * scale
    weights, skipped = tile_weights(scores, valid, threshold, query_tile, key_tile)
    # The sum of the weights is not rounded, as kernels have it before they round.
    total = weights.sum(-1, keepdim=True)
    weights = weights if short else rounded(weights, weights.new_ones(()) / WEIGHT_SCALE)
    return laid_out(torch.where(valid, weights @ value_wide / total, 0), query), skipped


def hopper(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid_rows: torch.Tensor,
    threshold: torch.Tensor,
    scale: float,
    query_block: int,
    key_block: int,
    query_tile: int,
    key_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel for Hopper, if blocks and tiles are its own: a scale for each query and for each tile of keys."""
    own = (1, SAGE.keys, QUERY_TILE, SAGE.keys)
    if not serves(query, key, value) or (query_block, key_block, query_tile, key_tile) != own:
        sizes = (query_block, key_block, query_tile, key_tile)
        return reference(query, key, value, valid_rows, threshold, scale, *sizes)
    if is_short(key, key_block):
        # The one tile there is is kept; the other variant's are smaller, and some of them might be skipped.
        return attend(BFLOAT16, query, key, value, valid_rows, torch.zeros_like(threshold), scale)
    return attend(SAGE, query, key, value, valid_rows, threshold, scale)


def is_short(key: torch.Tensor, key_block: int) -> bool:
    """Whether there are fewer rows than a block of keys; says so once."""
    rows = key.shape[-2]
    if rows >= key_block:
        return False
    # Python shows a warning once for each place and text.
    warnings.warn(f"SAGE attention over less than a block of {key_block} keys is computed dense", stacklevel=2)
    return True


def smooth(key: torch.Tensor, valid: torch.Tensor, valid_rows: torch.Tensor) -> torch.Tensor:
    """Keys [B, H, S, d] less the mean of the valid ones; padding, which holds zeros, stays so."""
    mean = key.sum(-2, keepdim=True) / valid_rows.to(key)
    return torch.where(valid, key - mean, 0)


def scales(amax: torch.Tensor) -> torch.Tensor:
    """Scales under which values up to `amax` fit E4M3."""
    return amax.clamp_min(AMAX_FLOOR) / E4M3_MAX


def block_scales(x: torch.Tensor, block: int) -> torch.Tensor:
    """The scale of each row of x [B, H, S, d]: [B, H, S, 1], equal in each `block` rows, 0 for all of them."""
    rows = x.shape[-2]
    block = block or rows
    amax = pad(x, (0, 0, 0, -rows % block)).unflatten(-2, (-1, block)).abs().amax((-2, -1))
    return scales(amax).repeat_interleave(block, -1)[..., :rows].unsqueeze(-1)


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x rounded to E4M3 under a scale, in x's dtype."""
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(x.dtype) * scale


_SMOOTH = """
    valid_count = Cast <to = 1> (valid_rows)
    key_sum = ReduceSum <keepdims = 1> (wide_key, row_axes)
    key_mean = Div (key_sum, valid_count)
    centred_key = Sub (wide_key, key_mean)
    smooth_key = Where (valid_column, centred_key, zero)
"""

_BLOCKS = """
    {x}_block_attribute = Constant <value_int: int = @{x}_block> ()
    {x}_has_block = Greater ({x}_block_attribute, first)
    {x}_block_rows = Where ({x}_has_block, {x}_block_attribute, rows)
    {x}_missing = Mod (negative_rows, {x}_block_rows)
    {x}_block_padding = Concat <axis = 0> (no_rows, {x}_missing)
    {x}_block_padded = Pad ({wide}, {x}_block_padding, zero, row_axes)
    {x}_blocks_of_rows = Add (rows, {x}_missing)
    {x}_block_count = Div ({x}_blocks_of_rows, {x}_block_rows)
    {x}_blocked_shape = Concat <axis = 0> (outer_axes, {x}_block_count, last_axis)
    {x}_blocked = Reshape ({x}_block_padded, {x}_blocked_shape)
    {x}_magnitude = Abs ({x}_blocked)
    {x}_block_amax = ReduceMax <keepdims = 1> ({x}_magnitude, last_axis)
    {x}_block_of_row = Div (positions, {x}_block_rows)
    {x}_amax = Gather <axis = 2> ({x}_block_amax, {x}_block_of_row)
"""

_ROUNDED = """
    {x}_fitting = Max ({x}_amax, floor)
    {x}_scale = Div ({x}_fitting, largest)
    {x}_scaled = Div ({wide}, {x}_scale)
    {x}_codes = QuantizeLinear <output_dtype = 17> ({x}_scaled, one)
    {x}_values = DequantizeLinear ({x}_codes, one)
    {x}_fine = Mul ({x}_values, {x}_scale)
    {x}_used = Where (is_short, {wide}, {x}_fine)
"""

_CONSTANTS = f"""
    one = Constant <value = float {{1.0}}> ()
    floor = Constant <value = float {{{AMAX_FLOOR}}}> ()
    largest = Constant <value = float {{{E4M3_MAX}}}> ()
    largest_weight = Constant <value = float {{{WEIGHT_SCALE}}}> ()
    row_axes = Constant <value_ints = [2]> ()
    no_rows = Constant <value_ints = [0]> ()
    outer_axes = Constant <value_ints = [0, 0]> ()
    negative_rows = Neg (rows)
    least_rows = Constant <value_int: int = @key_block> ()
    is_short = Less (rows, least_rows)
"""

_VALUE_AMAX = """
    value_magnitude = Abs (wide_value)
    value_amax = ReduceMax <keepdims = 1> (value_magnitude, row_axes)
"""

_WEIGHTS = """
    scaled_weights = Mul (weights, largest_weight)
    weight_codes = QuantizeLinear <output_dtype = 17> (scaled_weights, one)
    weight_values = DequantizeLinear (weight_codes, one)
    fine_weights = Div (weight_values, largest_weight)
    used_weights = Where (is_short, weights, fine_weights)
"""

BODY = (
    VALID
    + _CONSTANTS
    + _SMOOTH
    + _BLOCKS.format(x="query", wide="wide_query")
    + _ROUNDED.format(x="query", wide="wide_query")
    + _BLOCKS.format(x="key", wide="smooth_key")
    + _ROUNDED.format(x="key", wide="smooth_key")
    + _VALUE_AMAX
    + _ROUNDED.format(x="value", wide="wide_value")
    + SCORES.format(query="query_used", key="key_used")
    + SKIPPED
    + _WEIGHTS
    + MIXED.format(weights="used_weights", value="value_used")
)


OP = Op(
    "sage_attention",
    reference,
    fake,
    BODY,
    results=RESULTS,
    fast=(Fast("cuda", hopper, minimum=CAPABILITY, below=ABOVE),),
    plugin_shapes=result_shapes,
)
