"""How the transformer's blocks may attend, and what each way is when it leaves nothing out."""

from __future__ import annotations

from typing import Literal, get_args

ChosenAttention = Literal["dense", "sage", "skip", "sage+skip"]
"""What a profile may choose. All in the blocks' dtype; in 8-bit floats; without negligible tiles; both."""

BlockAttention = Literal[ChosenAttention, "vsa"]
"""Or "vsa", to a few tiles of the video, which a student has learned: its store attends so, whatever the profile says.
"""

ATTENTIONS: tuple[ChosenAttention, ...] = get_args(ChosenAttention)

SKIPPING: dict[BlockAttention, BlockAttention] = {"dense": "skip", "sage": "sage+skip"}
"""What an attention is when it leaves out tiles; with a threshold of 0 it leaves out none, and is the first again."""

WHOLE: dict[BlockAttention, BlockAttention] = {skipping: whole for whole, skipping in SKIPPING.items()}
"""The inverse."""

ATTENDING = ("block", "block.attend")
"""The graphs that attend; a model has one of them, and a store its variants for further tiers of quality."""

SKIP_THRESHOLD = "skip_threshold"
"""Their input, where they skip, that says how little a tile may weigh before it is left out: float32 [1], 0: none."""

SKIPPED_TILES = "skipped_tiles"
"""Their output, where they skip, that says how many tiles were left out: int64 [heads]."""


def skips(attention: BlockAttention) -> bool:
    """Whether tiles may be left out."""
    return attention in WHOLE


def quantises(attention: BlockAttention) -> bool:
    """Whether attention is computed in 8-bit floats."""
    return attention.startswith("sage")


VIDEO_SPARSE: BlockAttention = "vsa"

TILE_ROWS = "tile_rows"
"""An input, of blocks that attend to video tiles: the rows of each tile, then -1; int64 [tiles, 64]."""

ROW_TILES = "row_tiles"
"""Another: the tile of each row; int64 [rows]."""

TILE_COUNTS = "tile_counts"
"""Another: tiles of the prefix, and video tiles that a video tile attends to; int64 [2]."""

GATE = "gate"
"""What such blocks project rows to beside queries, keys and values: how far a summary of all tiles is added."""
