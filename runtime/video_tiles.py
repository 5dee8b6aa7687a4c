"""The rows of each tile of video-sparse attention, as its operation takes them (spec/model.md 8.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from plugins.block_attention import ROW_TILES, TILE_COUNTS, TILE_ROWS
from plugins.video_tiles import SIDES, TILE, Grid, TileCounts
from runtime.packing import Layout

EMPTY = -1
"""In the places that a tile does not fill."""


@dataclass(frozen=True, eq=False)
class VideoTiles:
    """Tiles of one request's packed rows; int64 tensors.

    rows [T, 64]: packed rows of each tile, the prefix' tiles first, EMPTY behind the last row of a tile. of_row [S]:
    the tile of each packed row. counts [2]: tiles of the prefix, and video tiles that each video tile attends to.
    """

    rows: torch.Tensor
    of_row: torch.Tensor
    counts: torch.Tensor

    def to(self, device: torch.device) -> VideoTiles:
        """The same on a device."""
        return VideoTiles(self.rows.to(device), self.of_row.to(device), self.counts.to(device))

    @property
    def inputs(self) -> Mapping[str, torch.Tensor]:
        """By the names that graphs have for them."""
        return {TILE_ROWS: self.rows, ROW_TILES: self.of_row, TILE_COUNTS: self.counts}


def video_tiles(layout: Layout, sparsity: float) -> VideoTiles:
    """The tiles of a layout, of whose video tiles `sparsity` is the share that is left out.

    Rows before the generated video are cut into tiles run by run, a run being rows of one tag; the video into tiles of
    4 latent frames, 4 rows and 4 columns of patches, smaller ones at its ends. Raises ValueError where rows follow
    the video, which belong to no tile.
    """
    start = layout.target_video.start
    if layout.target_video.stop != layout.rows:
        raise ValueError(f"layout: {layout.rows - layout.target_video.stop} rows follow the generated video")
    runs = _runs(layout.token_tags[:start].numpy())
    tiles = [*_prefix_tiles(runs), *_video_tiles(start, layout.target_grid)]
    counts = TileCounts.of(runs, layout.target_grid, sparsity)
    rows = np.full((len(tiles), TILE), EMPTY, dtype=np.int64)
    of_row = np.empty(layout.rows, dtype=np.int64)
    for index, tile in enumerate(tiles):
        rows[index, : len(tile)] = tile
        of_row[tile] = index
    return VideoTiles(
        torch.from_numpy(rows), torch.from_numpy(of_row), torch.tensor([counts.prefix, counts.kept], dtype=torch.int64)
    )


def _runs(tags: NDArray[np.int64]) -> list[int]:
    """Lengths of the longest stretches of equal tags."""
    ends = np.flatnonzero(np.diff(tags)) + 1
    return [int(length) for length in np.diff([0, *ends, len(tags)]) if length]


def _prefix_tiles(runs: list[int]) -> Iterator[NDArray[np.int64]]:
    start = 0
    for length in runs:
        rows = np.arange(start, start + length)
        yield from (rows[first : first + TILE] for first in range(0, length, TILE))
        start += length


def _video_tiles(start: int, grid: Grid) -> Iterator[NDArray[np.int64]]:
    """Tiles along the columns of a picture, then its rows, then its frames; and so the rows within each."""
    rows = start + np.arange(np.prod(grid)).reshape(grid)
    frames, heights, widths = (range(0, size, side) for size, side in zip(grid, SIDES, strict=True))
    for t in frames:
        for y in heights:
            for x in widths:
                yield rows[t : t + SIDES[0], y : y + SIDES[1], x : x + SIDES[2]].reshape(-1)
