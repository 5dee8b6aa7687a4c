"""Spatial tiles of the video VAE: where they lie, and how their overlaps are blended."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Axis:
    """Tiles along one side of a picture: starts, size and the overlap of each tile with the next, in one unit."""

    length: int
    tile: int
    starts: tuple[int, ...]
    overlaps: tuple[int, ...]

    def before(self, index: int) -> int:
        """Overlap of a tile with the one before it; 0 for the first."""
        return self.overlaps[index - 1] if index else 0

    def after(self, index: int) -> int:
        """Overlap of a tile with the one after it; 0 for the last."""
        return self.overlaps[index] if index < len(self.overlaps) else 0

    def kept(self, index: int) -> int:
        """Extent that a tile contributes: from its own start to the start of the next."""
        return self.tile - self.after(index)


def tile_axis(length: int, tile: int, minimum_overlap: int, step: int) -> Axis:
    """Fewest tiles that cover `length` with at least the minimum overlap; the slack is dealt round-robin in `step`s.

    Equal to diffusers' AutoencoderKLMiniMaxH3._split_tiles (spec/model.md 6.4). All in pixels; `step` is the pixels of
    a latent cell, so that starts stay on the latent grid. A length of at most one tile gives one tile of that length.
    Raises ValueError when length is not a positive multiple of step.
    """
    if length <= 0 or length % step:
        raise ValueError(f"length: {length} is not a positive multiple of {step}")
    if length <= tile:
        return Axis(length, length, (0,), ())
    count = max(math.ceil(length / tile), math.ceil((length - minimum_overlap) / (tile - minimum_overlap)))
    gaps = count - 1
    extra, last = divmod((tile * count - minimum_overlap * gaps - length) // step, gaps)
    overlaps = tuple(minimum_overlap + step * (extra + (gap < last)) for gap in range(gaps))
    starts = [0]
    for overlap in overlaps:
        starts.append(starts[-1] + tile - overlap)
    return Axis(length, tile, tuple(starts), overlaps)


@dataclass(frozen=True)
class TileGrid:
    """Tiles of a picture: rows of tiles by columns of tiles."""

    rows: Axis
    columns: Axis

    @classmethod
    def cover(cls, height: int, width: int, tile: int, minimum_overlap: int, step: int) -> TileGrid:
        """The grid over a picture of height x width pixels; arguments as in `tile_axis`."""
        return cls(
            tile_axis(height, tile, minimum_overlap, step),
            tile_axis(width, tile, minimum_overlap, step),
        )

    @property
    def count(self) -> int:
        """Tiles of the grid."""
        return len(self.rows.starts) * len(self.columns.starts)

    def places(self) -> Iterator[tuple[int, int]]:
        """(row, column) of every tile, row by row, the order that a Stitcher takes them in."""
        for row in range(len(self.rows.starts)):
            for column in range(len(self.columns.starts)):
                yield row, column


class Stitcher:
    """Blends tiles into a canvas [..., H, W] as they come, row by row.

    Each tile is cross-faded with the tile above it, then with the tile to its left, always against their raw pixels
    and not against what they were blended into: that is the reference's output (diffusers'
    AutoencoderKLMiniMaxH3._stitch_tiles, to the bit). Only the overlapping strips of raw tiles are remembered, and
    they are copies: a caller may reuse a tile's memory.
    """

    def __init__(self, grid: TileGrid, canvas: torch.Tensor) -> None:
        """Make one for a canvas that is written in place; raises ValueError when it has not the grid's size."""
        if canvas.shape[-2:] != (grid.rows.length, grid.columns.length):
            raise ValueError(f"canvas: {tuple(canvas.shape[-2:])} is not {grid.rows.length} x {grid.columns.length}")
        self._grid = grid
        self._canvas = canvas
        self._places = grid.places()
        self._above: dict[int, torch.Tensor] = {}
        self._left: torch.Tensor | None = None

    def place(self, row: int, column: int, tile: torch.Tensor) -> None:
        """Blend in the next tile [..., tile height, tile width]; raises ValueError out of order or of wrong size."""
        rows, columns = self._grid.rows, self._grid.columns
        if next(self._places, None) != (row, column):
            raise ValueError(f"tile ({row}, {column}) is out of order; tiles come row by row")
        if tile.shape != (*self._canvas.shape[:-2], rows.tile, columns.tile):
            raise ValueError(f"tile: shape {tuple(tile.shape)} is not {rows.tile} x {columns.tile} on this canvas")
        top, left, height, width = rows.starts[row], columns.starts[column], rows.kept(row), columns.kept(column)
        region = self._canvas[..., top : top + height, left : left + width]
        region.copy_(tile[..., :height, :width])
        if row:
            fade_in(region, self._above[column][..., :width], rows.before(row), dim=-2)
        if column and self._left is not None:
            fade_in(region, self._left[..., :height, :], columns.before(column), dim=-1)
        self._remember(row, column, tile)

    def _remember(self, row: int, column: int, tile: torch.Tensor) -> None:
        rows, columns = self._grid.rows, self._grid.columns
        self._above[column] = tile[..., rows.tile - rows.after(row) :, :].clone()
        self._left = tile[..., columns.tile - columns.after(column) :].clone()


def fade_in(region: torch.Tensor, neighbour: torch.Tensor, extent: int, dim: int) -> None:
    """Cross-fade, in place, the first `extent` cells of a region along the negative `dim` from its raw neighbour.

    neighbour: the neighbour's cells over the overlap. Cell p becomes (1 - p/extent) * neighbour + (p/extent) * region.
    """
    # A tile whose next neighbour starts inside this overlap keeps less of it than is faded over.
    cells = min(extent, region.shape[dim])
    shape = [cells] + [1] * (-dim - 1)
    weight = torch.arange(cells, dtype=region.dtype, device=region.device) / extent
    faded = region.narrow(dim, 0, cells)
    faded.mul_(weight.view(shape)).add_(neighbour.narrow(dim, 0, cells) * (1 - weight).view(shape))
