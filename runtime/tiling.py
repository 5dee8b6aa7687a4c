"""How the overlaps of the video VAE's tiles are blended."""

from __future__ import annotations

import torch

from plugins.tiling import TileGrid


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
