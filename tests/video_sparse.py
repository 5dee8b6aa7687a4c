"""Video-sparse attention written from its description (spec/model.md 8.3), one query tile at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
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
            weights = softmax(
                query[head, rows] @ key[head].T * scale, attended(scores[tile], tile, tiles, prefix, kept)
            )
            result[head, rows] = weights @ value[head] + gate[head, rows] * (softmax(scores[tile]) @ v)
    return result


def attended(scores: Doubles, tile: int, tiles: Tiles, prefix: int, kept: int) -> NDArray[np.bool_]:
    """Which rows a tile attends to, from its scores with all tiles."""
    if tile < prefix:
        chosen = list(range(len(tiles)))
    else:
        best = sorted(range(prefix, len(tiles)), key=lambda other: (-scores[other], other))
        chosen = [*range(prefix), *best[:kept]]
    mask = np.zeros(sum(map(len, tiles)), dtype=bool)
    for other in chosen:
        mask[tiles[other]] = True
    return mask


def softmax(scores: Doubles, mask: NDArray[np.bool_] | None = None) -> Doubles:
    """Over the last axis, of what the mask leaves."""
    masked = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(masked - masked.max(-1, keepdims=True))
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
