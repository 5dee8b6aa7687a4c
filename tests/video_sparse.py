"""Video-sparse attention written from its description (spec/model.md 8.3), one query tile at a time, in float64; and in
diffusers' transformer, which does not have it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention, _apply_rotary_emb
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

Tiles = list[list[int]]
"""The rows of each tile."""


def formula(
    query: Doubles, key: Doubles, value: Doubles, gate: Doubles, tiles: Tiles, prefix: int, kept: int, scale: float
) -> Doubles:
    """Heads of [H, S, d] over `tiles`: the first are a prefix, each of the others attends to `kept` of the others."""
    result = np.empty_like(query)
    for head in range(len(query)):
        q, k, v = (np.stack([x[head, rows].mean(0) for rows in tiles]) for x in (query, key, value))
        scores = q @ k.T * scale
        for tile, rows in enumerate(tiles):
            others = attended(scores[tile], tile, tiles, prefix, kept)
            mixed = softmax(query[head, rows] @ key[head, others].T * scale) @ value[head, others]
            result[head, rows] = mixed + gate[head, rows] * (softmax(scores[tile]) @ v)
    return result


def attended(scores: Doubles, tile: int, tiles: Tiles, prefix: int, kept: int) -> list[int]:
    """The rows that a tile attends to, from its scores with all tiles."""
    chosen = list(range(len(tiles)))
    if tile >= prefix:
        best = sorted(range(prefix, len(tiles)), key=lambda other: (-scores[other], other))
        chosen = [*range(prefix), *best[:kept]]
    return [row for other in chosen for row in tiles[other]]


def softmax(scores: Doubles) -> Doubles:
    """Over the last axis."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def tiles_of(tags: Sequence[int], grid: tuple[int, int, int]) -> tuple[Tiles, int]:
    """The tiles of a sequence whose prefix has these tags, and how many of them are the prefix'."""
    tiles: Tiles = []
    for row, tag in enumerate(tags):
        # A tile ends where it is full, and where the tag changes.
        if row and tag == tags[row - 1] and len(tiles[-1]) < 64:
            tiles[-1].append(row)
        else:
            tiles.append([row])
    prefix = len(tiles)
    places: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(np.ndindex(*grid)):
        places.setdefault(tuple(axis // 4 for axis in place), []).append(len(tags) + number)
    return [*tiles, *(places[place] for place in sorted(places))], prefix


def kept_of(video_tiles: int, tenths_left_out: int) -> int:
    """Video tiles that one attends to, for a sparsity in tenths."""
    return max(1, math.ceil((10 - tenths_left_out) * video_tiles / 10))


class TileProcessor:
    """Queries, keys and values as diffusers makes them, mixed in float64 (spec/model.md 8.3)."""

    def __init__(self, tiles: Tiles, prefix: int, kept: int) -> None:
        self._tiles, self._prefix, self._kept = tiles, prefix, kept

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows [1, S, D] to rows [1, S, D]."""
        projections = attn.to_q, attn.to_k, attn.to_v, attn.to_gate_compress
        query, key, value, gate = (p(hidden_states).unflatten(-1, (attn.heads, -1)) for p in projections)
        query = _apply_rotary_emb(attn.norm_q(query), *rotary_emb)
        key = _apply_rotary_emb(attn.norm_k(key), *rotary_emb)
        heads = (x[0].transpose(0, 1).double().numpy() for x in (query, key, value, gate))
        mixed = formula(*heads, self._tiles, self._prefix, self._kept, attn.head_dim**-0.5)
        rows = torch.from_numpy(mixed).transpose(0, 1).flatten(1).to(hidden_states.dtype)
        result: torch.Tensor = attn.to_out[0](rows[None])
        return result
