"""Tiles of video-sparse attention: how many a sequence has, and what attending to some of them takes.

Source: spec/model.md 8.3. What stands before the generated video is its prefix; nothing stands behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

SIDES = (4, 4, 4)
"""Latent frames, rows and columns of patches that a video tile spans; those at a picture's ends span what is left."""

TILE = math.prod(SIDES)
"""Most rows of a tile."""

Grid = tuple[int, int, int]
"""Latent frames, rows and columns of patches."""


SCRATCH_BYTES = 256 << 20
"""Most memory that tiles' scores, their softmax and the lists of chosen tiles take at a time on a GPU."""


@dataclass(frozen=True)
class TileCounts:
    """Tiles of a sequence: of its prefix, of its video, and how many of the video's a video tile attends to."""

    prefix: int
    video: int
    kept: int

    @staticmethod
    def of(runs: Iterable[int], grid: Grid, sparsity: float) -> TileCounts:
        """The counts for a prefix of `runs` of rows of one tag each, no tile crossing from one to the next."""
        video = math.prod(along(grid))
        return TileCounts(sum(-(-rows // TILE) for rows in runs), video, kept_tiles(video, sparsity))

    @property
    def all(self) -> int:
        """Tiles of the whole sequence."""
        return self.prefix + self.video

    def pairs(self, prefix_rows: int, video_rows: int) -> int:
        """Queries times the keys that they attend to, at most: kept tiles may be smaller than the largest."""
        attended = prefix_rows + min(video_rows, self.kept * TILE)
        return prefix_rows * (prefix_rows + video_rows) + video_rows * attended


def along(grid: Grid) -> Grid:
    """Video tiles along each axis of a grid."""
    frames, rows, columns = (-(-size // side) for size, side in zip(grid, SIDES, strict=True))
    return frames, rows, columns


def kept_tiles(video: int, sparsity: float) -> int:
    """Video tiles that one of so many attends to: the share that `sparsity` leaves, rounded up, at least one.

    Exact in the number as it is written: a share of 0.3 of 10 tiles is 3, not 4.
    """
    return max(1, math.ceil((1 - Fraction(repr(sparsity))) * video))


def heads_together(heads: int, tiles: int) -> int:
    """Heads whose tiles are scored and chosen together within `SCRATCH_BYTES`: groups as equal as can be."""
    most = max(1, SCRATCH_BYTES // scratch_bytes(1, tiles))
    groups = -(-heads // most)
    return -(-heads // groups)


def scratch_bytes(heads: int, tiles: int) -> int:
    """Bytes of some heads' scores and their softmax in float32, and of the lists of chosen tiles."""
    return 3 * 4 * heads * tiles * tiles
