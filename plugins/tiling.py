"""Spatial tiles and temporal chunks of the video VAE: how many there are and where they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from plugins.dimensions import VideoVAEDimensions

TILES_AHEAD = 4
"""Decoded tiles, for each rank that shares them, that the first one holds at most: the others go on while it decodes
the soundtrack or hands on a chunk's frames."""


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


def tile_grid(height: int, width: int, vae: VideoVAEDimensions) -> TileGrid:
    """The decoder's tiles over a picture of height x width pixels."""
    return TileGrid.cover(height, width, vae.tile, vae.tile_overlap, vae.spatial_ratio)


def chunk_count(latent_frames: int, vae: VideoVAEDimensions) -> int:
    """Decoder calls in time, n of 5n + 2 latent frames; 0 where there is no such n of at least 1."""
    chunks, left_over = divmod(latent_frames - vae.token_overlap, vae.clip_latents)
    return 0 if left_over else max(0, chunks)


def used_tile(vae: VideoVAEDimensions) -> tuple[int, int, int, int]:
    """Of a decoded tile, what becomes frames: channels, frames (body and tail), both sides."""
    return 3, vae.clip_frames + vae.frame_overlap, vae.tile, vae.tile


def tiles_ahead(vae: VideoVAEDimensions, ranks: int) -> int:
    """Values of the tiles that the first of so many ranks holds at most, beside the one that it decodes."""
    return TILES_AHEAD * ranks * math.prod(used_tile(vae)) if ranks > 1 else 0
