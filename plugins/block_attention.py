"""How the transformer's blocks may attend, and what each way is when it leaves nothing out."""

from __future__ import annotations

from typing import Literal, get_args

BlockAttention = Literal["dense", "sage", "skip", "sage+skip"]
"""All in the blocks' dtype; in 8-bit floats; without negligible tiles; both."""

ATTENTIONS: tuple[BlockAttention, ...] = get_args(BlockAttention)

SKIPPING: dict[BlockAttention, BlockAttention] = {"dense": "skip", "sage": "sage+skip"}
"""What an attention is when it leaves out tiles; with a threshold of 0 it leaves out none, and is the first again."""

WHOLE: dict[BlockAttention, BlockAttention] = {skipping: whole for whole, skipping in SKIPPING.items()}
"""The inverse."""


def skips(attention: BlockAttention) -> bool:
    """Whether tiles may be left out."""
    return attention in WHOLE


def quantises(attention: BlockAttention) -> bool:
    """Whether attention is computed in 8-bit floats."""
    return attention.startswith("sage")
