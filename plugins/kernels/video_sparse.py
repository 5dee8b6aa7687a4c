"""Video-sparse attention in the Triton language: rows are laid out by tiles, tiles chosen, chosen ones attended to.

Everything that depends on the request is data on the device, so that nothing waits for the host. Chosen tiles are
listed for each tile of queries, with the number of rows of each; scores and lists are made for some heads at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.video_tiles import TILE, heads_together

TILE_BITS = 7
"""Bits of a list's element that say how many rows of its tile are filled; the others say which tile."""

LAYOUT_WARPS, CHOOSE_WARPS = 4, 4

ATTEND_WARPS, ATTEND_STAGES = 4, 3
"""A warpgroup for each tile of queries, of which two fit a multiprocessor of Hopper, and hide each other's softmax: 165
registers, 112 KiB of shared memory. Two stages take 80 KiB, of which two fit as well."""

LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=("tile_count",))
def _lay_out(
    x, tile_rows, tiles, means, heads, tile_count, batch_stride, head_stride, row_stride,
    TILE: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """One tile of one head: its rows side by side, zeros where it has none, and their mean."""
    tile, each = tl.program_id(0), tl.program_id(1)
    place, channel = tl.arange(0, TILE), tl.arange(0, HEAD)
    row = tl.load(tile_rows + tile * TILE + place)
    filled = (row >= 0)[:, None]
    batch, head = (each // heads).to(tl.int64), (each % heads).to(tl.int64)
    start = x + batch * batch_stride + head * head_stride
    value = tl.load(start + row[:, None] * row_stride + channel[None, :], mask=filled, other=0.0)
    at = (each.to(tl.int64) * tile_count + tile) * TILE
    tl.store(tiles + (at + place)[:, None] * HEAD + channel[None, :], value)
    count = tl.sum((row >= 0).to(tl.float32), 0)
    mean = tl.sum(value.to(tl.float32), 0) / count
    tl.store(means + (each.to(tl.int64) * tile_count + tile) * HEAD + channel, mean)


@triton.jit(do_not_specialize=("tile_count",))
def _choose(scores, tile_sizes, tile_counts, listed, tile_count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The list of one tile of queries of one head: tiles in the order of their indices."""
    tile, head = tl.program_id(0), tl.program_id(1)
    prefix, kept = tl.load(tile_counts), tl.load(tile_counts + 1)
    other = tl.arange(0, BLOCK)
    there = other < tile_count
    at = (head.to(tl.int64) * tile_count + tile) * tile_count
    score = tl.load(scores + at + other, mask=there, other=0.0)
    # As whole numbers from 0 in the same order; the zeros are equal. Tiles that are not there come last.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    ranked = there & (other >= prefix)
    key = tl.where(ranked, key, -1)
    # The largest number that at least `kept` of them reach, bit by bit.
    least = kept * 0
    for step in range(32):
        bit = (kept * 0 + 1) << (31 - step)
        tried = least | bit
        reached = tl.sum((key >= tried).to(tl.int32), 0)
        least = tl.where(reached >= kept, tried, least)
    above = key > least
    equal = key == least
    missing = kept - tl.sum(above.to(tl.int32), 0)
    first = equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing)
    takes = there & ((tile < prefix) | (other < prefix) | above | first)
    filled = tl.load(tile_sizes + other, mask=there, other=0)
    position = tl.cumsum(takes.to(tl.int32), 0) - 1
    tl.store(listed + at + position, (other << BITS) | filled, mask=takes)


@triton.jit(do_not_specialize=("first", "tile_count"))
def _attend(
    queries, keys, values, summary, gate, tile_rows, tile_counts, listed, result, heads, first, tile_count,
    gate_batch_stride, gate_head_stride, gate_row_stride, batch_stride, head_stride, row_stride, scale,
    TILE: tl.constexpr, BITS: tl.constexpr, HEAD: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head over the tiles of its list."""
    tile, local = tl.program_id(0), tl.program_id(1)
    each = (first + local).to(tl.int64)
    prefix, kept = tl.load(tile_counts), tl.load(tile_counts + 1)
    count = tl.where(tile < prefix, tile_count, prefix + kept).to(tl.int32)
    place, channel = tl.arange(0, TILE), tl.arange(0, HEAD)
    within = place[:, None] * HEAD + channel[None, :]
    turned = channel[:, None] + place[None, :] * HEAD
    base = each * tile_count * TILE * HEAD
    query = tl.load(queries + base + tile.to(tl.int64) * TILE * HEAD + within)
    listed += (local.to(tl.int64) * tile_count + tile) * tile_count
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, HEAD], tl.float32)
    for index in tl.range(0, count, num_stages=STAGES):
        entry = tl.load(listed + index)
        at = base + (entry >> BITS).to(tl.int64) * TILE * HEAD
        key = tl.load(keys + at + turned)
        score = tl.dot(query, key, input_precision=PRECISION) * scale
        score = tl.where(place[None, :] < (entry & ((1 << BITS) - 1)), score, float("-inf"))
        risen = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - risen[:, None])
        shrunk = tl.exp2(largest - risen)
        total = total * shrunk + tl.sum(weight, 1)
        value = tl.load(values + at + within)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * shrunk[:, None], input_precision=PRECISION)
        largest = risen
    row = tl.load(tile_rows + tile * TILE + place)
    filled = (row >= 0)[:, None]
    batch, head = each // heads, each % heads
    gate += batch * gate_batch_stride + head * gate_head_stride
    opened = tl.load(gate + row[:, None] * gate_row_stride + channel[None, :], mask=filled, other=0.0)
    told = tl.load(summary + (each * tile_count + tile) * HEAD + channel)
    mixed = mixed / total[:, None] + opened.to(tl.float32) * told[None, :]
    result += batch * batch_stride + head * head_stride
    tl.store(result + row[:, None] * row_stride + channel[None, :], mixed.to(result.dtype.element_ty), mask=filled)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    tile_rows: torch.Tensor,
    tile_counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `plugins.ops.video_sparse_attention.reference`, of tensors that its `check` passes, in the query's layout.

    Weights are rounded to the query's dtype.
    """
    batch, heads, _, head = query.shape
    count, device = tile_rows.shape[0], query.device
    sizes = batch * heads, count
    laid = [torch.empty(*sizes, TILE, head, dtype=query.dtype, device=device) for _ in range(3)]
    means = [torch.empty(*sizes, head, dtype=torch.float32, device=device) for _ in range(3)]
    for x, tiles, mean in zip((query, key, value), laid, means, strict=True):
        strides = x.stride()[:3]
        _lay_out[(count, sizes[0])](
            x, tile_rows, tiles, mean, heads, count, *strides, TILE=TILE, HEAD=head, num_warps=LAYOUT_WARPS
        )
    result, summary = torch.empty_like(query), torch.empty_like(means[2])
    tile_sizes = (tile_rows >= 0).sum(-1, dtype=torch.int32)
    for first in range(0, sizes[0], group := heads_together(*sizes)):
        last = min(first + group, sizes[0])
        listed = _lists([mean[first:last] for mean in means], summary[first:last], tile_sizes, tile_counts, scale)
        _attend[(count, last - first)](
            *laid, summary, gate, tile_rows, tile_counts, listed, result, heads, first, count,
            *gate.stride()[:3], *result.stride()[:3], scale * LOG2_E,
            TILE=TILE, BITS=TILE_BITS, HEAD=head, PRECISION="ieee", STAGES=ATTEND_STAGES, num_warps=ATTEND_WARPS,
        )  # fmt: skip
    return result


def _lists(
    means: list[torch.Tensor],
    summary: torch.Tensor,
    tile_sizes: torch.Tensor,
    tile_counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Lists of chosen tiles [G, T, T] int32 of some heads; writes their summaries [G, T, d]."""
    query, key, value = means
    scores = torch.bmm(query, key.mT).mul_(scale)
    listed = torch.empty(scores.shape, dtype=torch.int32, device=scores.device)
    count = scores.shape[-1]
    block = triton.next_power_of_2(count)
    _choose[(count, len(scores))](
        scores, tile_sizes, tile_counts, listed, count, BITS=TILE_BITS, BLOCK=block, num_warps=CHOOSE_WARPS
    )
    torch.bmm(scores.softmax(-1), value, out=summary)
    return listed
