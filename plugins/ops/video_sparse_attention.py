"""Attention of tiles of rows to the tiles that matter most to them, and a gated summary of all tiles.

Source: spec/model.md 8.3 (FastVideo's VSA-H3). The choice of tiles is by scores of their means, in float32; among
tiles of equal scores those of lower index come first.
"""

from __future__ import annotations

import torch

from plugins.op import Fast, Op
from plugins.ops.attention_tiles import laid_out
from plugins.video_tiles import TILE

FIRST = float("inf")
"""Score of a tile that everybody attends to."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

HEADS_OF = (16, 32, 64, 128)
"""Channels of a head that the kernels take."""


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    tile_rows: torch.Tensor,
    row_tiles: torch.Tensor,
    tile_counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`softmax(scale * query @ key^T) @ value` over the rows of chosen tiles, plus `gate` times a summary of all.

    query, key, value and gate [B, H, S, d]. tile_rows [T, R] int64: the rows of each tile, then -1 in the places that
    it does not fill; each row is in one tile, each tile has a row, and those of the prefix come first. row_tiles [S]
    int64: the tile of each row. tile_counts [2] int64: tiles of the prefix, and of the others how many are chosen.

    A tile's queries and keys are its rows' means, and tiles score by their product times `scale`. Tiles of the prefix
    attend to all; the others to the prefix and to those with the largest scores. The summary is that of the tiles'
    mean values, weighted by the softmax of all their scores. Returns [B, H, S, d] in the query's dtype.
    """
    wide_query, wide_key, wide_value, wide_gate = (
        x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value, gate)
    )
    mean_query, mean_key, mean_value = (_means(x, tile_rows) for x in (wide_query, wide_key, wide_value))
    tile_scores = mean_query @ mean_key.mT * scale
    attended = chosen(tile_scores, tile_counts)[:, :, row_tiles][..., row_tiles]
    scores = torch.where(attended, wide_query @ wide_key.mT * scale, -torch.inf)
    summary = (tile_scores.softmax(-1) @ mean_value)[:, :, row_tiles]
    return laid_out(scores.softmax(-1) @ wide_value + wide_gate * summary, query)


def fake(query: torch.Tensor, *others: object) -> torch.Tensor:
    """A result with the query's shape, dtype and layout."""
    return torch.empty_like(query)


def chosen(tile_scores: torch.Tensor, tile_counts: torch.Tensor) -> torch.Tensor:
    """Which tiles of keys each tile of queries attends to: bool [B, H, T, T], from its scores and the counts [2]."""
    prefix, kept = tile_counts
    in_prefix = torch.arange(tile_scores.shape[-1], device=tile_scores.device) < prefix
    order = torch.where(in_prefix, FIRST, tile_scores).argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return (torch.empty_like(order).scatter(-1, order, ranks) < prefix + kept) | in_prefix.unsqueeze(-1)


def _means(x: torch.Tensor, tile_rows: torch.Tensor) -> torch.Tensor:
    """Means of each tile's rows: [B, H, S, d] to [B, H, T, d]."""
    filled = (tile_rows >= 0).unsqueeze(-1)
    tiles = x[:, :, tile_rows.clamp_min(0)]
    return torch.where(filled, tiles, 0).sum(-2) / filled.sum(-2)


def sparse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    tile_rows: torch.Tensor,
    row_tiles: torch.Tensor,
    tile_counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Kernels in the Triton language, which compute the chosen tiles alone.

    Raises:
        ValueError: they do not take such tensors. What would attend to everything instead is not run on a GPU.
    """
    check(query, key, value, gate, tile_rows)
    from plugins.kernels import video_sparse

    return video_sparse.attend(query, key, value, gate, tile_rows, tile_counts, scale)


def check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gate: torch.Tensor, tile_rows: torch.Tensor
) -> None:
    """Raises ValueError, saying what the kernels take, for what they do not: another way would hold all scores."""
    found = f"{str(query.dtype).removeprefix('torch.')} {list(query.shape)} in tiles of {tile_rows.shape[1]}"
    if tile_rows.shape[1] != TILE or query.shape[-1] not in HEADS_OF or query.dtype not in DTYPES:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        sizes = ", ".join(map(str, HEADS_OF))
        raise ValueError(f"{OP.name}: {found}: must be {kinds}, with heads of {sizes} channels, in tiles of {TILE}")
    for name, x in (("key", key), ("value", value), ("gate", gate)):
        if (x.shape, x.dtype) != (query.shape, query.dtype):
            raise ValueError(f"{OP.name}: {name} {x.dtype} {list(x.shape)}: must be as the query, {found}")
    if any(x.stride(-1) != 1 for x in (query, key, value, gate)):
        raise ValueError(f"{OP.name}: {found}: the channels of each row must lie side by side")


_MEAN = """
    {name}_places = Gather <axis = 2> (wide_{name}, rows_of_places)
    {name}_filled = Where (filled, {name}_places, zero)
    {name}_sums = ReduceSum <keepdims = 0> ({name}_filled, place_axis)
    mean_{name} = Div ({name}_sums, sizes)
"""

# Scores have no float64 in a graph: 3.0e38 is larger than any of them.
BODY = (
    """
    zero = Constant <value = float {0.0}> ()
    one = Constant <value = float {1.0}> ()
    lowest = Constant <value_float = -3.0e38> ()
    highest = Constant <value_float = 3.0e38> ()
    no_row = Constant <value = int64 {0}> ()
    next = Constant <value = int64 {1}> ()
    last_axis = Constant <value_ints = [-1]> ()
    place_axis = Constant <value_ints = [3]> ()
    row_axis = Constant <value_ints = [1]> ()
    factor = Constant <value_float: float = @scale> ()
    wide_query = Cast <to = 1> (query)
    wide_key = Cast <to = 1> (key)
    wide_value = Cast <to = 1> (value)
    wide_gate = Cast <to = 1> (gate)
    is_filled = GreaterOrEqual (tile_rows, no_row)
    filled = Unsqueeze (is_filled, last_axis)
    ones = Cast <to = 1> (is_filled)
    sizes = ReduceSum <keepdims = 1> (ones, row_axis)
    rows_of_places = Max (tile_rows, no_row)
"""
    + "".join(_MEAN.format(name=name) for name in ("query", "key", "value"))
    + """
    turned_means = Transpose <perm = [0, 1, 3, 2]> (mean_key)
    mean_products = MatMul (mean_query, turned_means)
    tile_scores = Mul (mean_products, factor)
    tile_weights = Softmax <axis = -1> (tile_scores)
    tile_summary = MatMul (tile_weights, mean_value)
    summary = Gather <axis = 2> (tile_summary, row_tiles)
    gated = Mul (wide_gate, summary)

    count_axis = Constant <value_ints = [0]> ()
    prefix = Gather <axis = 0> (tile_counts, count_axis)
    most = ReduceSum <keepdims = 1> (tile_counts, count_axis)
    tiles = Shape <start = 0, end = 1> (tile_rows)
    no_axes = Constant <value_ints = [0]> ()
    tile_number = Squeeze (tiles, no_axes)
    positions = Range (no_row, tile_number, next)
    in_prefix = Less (positions, prefix)
    ranked = Where (in_prefix, highest, tile_scores)
    best_scores, best = TopK <axis = -1, largest = 1, sorted = 1> (ranked, most)
    nothing = Sub (tile_scores, tile_scores)
    best_shape = Shape (best)
    marks = Expand (one, best_shape)
    marked = ScatterElements <axis = -1> (nothing, best, marks)
    is_marked = Greater (marked, zero)
    prefix_column = Unsqueeze (in_prefix, last_axis)
    tile_pairs = Or (is_marked, prefix_column)
    row_pairs = Gather <axis = 2> (tile_pairs, row_tiles)
    attended = Gather <axis = 3> (row_pairs, row_tiles)
    turned_key = Transpose <perm = [0, 1, 3, 2]> (wide_key)
    products = MatMul (wide_query, turned_key)
    all_scores = Mul (products, factor)
    scores = Where (attended, all_scores, lowest)
    weights = Softmax <axis = -1> (scores)
    mixed = MatMul (weights, wide_value)
    both = Add (mixed, gated)
    result = CastLike (both, query)
"""
)

# The reference, named for the CPU, is called by a compiler as it is: its choices are made of data.
OP = Op(
    "video_sparse_attention",
    reference,
    fake,
    BODY,
    fast=(Fast("cuda", sparse), Fast("cpu", reference)),
    plugin_shapes=lambda inputs, _: [list(inputs[0])],
)
