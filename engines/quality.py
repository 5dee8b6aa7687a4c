"""Tiers of quality: what a request may choose its forwards to be computed with, and the engines that they need.

A tier is named by what it changes from the model as it is released: how the linears are computed, if they are
quantised, then how the blocks attend, if not densely; "lossless" changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from engines.adapters import without_sides
from plugins.block_attention import ATTENTIONS, SKIPPING, BlockAttention

Linears = Literal["float32", "bfloat16", "fp8", "nvfp4"]
"""How the denoiser's linear layers are computed."""

QUANTISED: tuple[Linears, ...] = ("fp8", "nvfp4")

LOSSLESS = "lossless"

UNCHANGED: tuple[BlockAttention, ...] = ("dense", "vsa")
"""How blocks attend in models as they are released, students among them."""


def tier_name(linears: Linears, attention: BlockAttention) -> str:
    """The name of a tier, such as "lossless", "skip" or "fp8+sage"."""
    changes = [linears] if linears in QUANTISED else []
    return "+".join([*changes, *([attention] if attention not in UNCHANGED else [])]) or LOSSLESS


TIERS: dict[str, tuple[Linears, BlockAttention]] = {
    tier_name(linears, kind): (linears, kind) for linears in ("bfloat16", *QUANTISED) for kind in ATTENTIONS
}
"""Every tier there can be, by name; a profile offers some of them."""


class Tier(BaseModel):
    """What one tier computes with.

    In forwards whose video sigma is above `skip_below` nothing is skipped; in the others, tiles of keys whose weight,
    relative to a row's largest, is below `skip_threshold`. The refiner's blocks are dense in all tiers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    linears: Linears
    attention: BlockAttention
    skip_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    skip_below: Annotated[float, Field(ge=0, le=1)] = 1.0

    @property
    def name(self) -> str:
        """What requests call it."""
        return tier_name(self.linears, self.attention)


def further_engines(base: BlockAttention, offered: Collection[BlockAttention]) -> tuple[BlockAttention, ...]:
    """The attentions that need an engine of the block beside the base's, to serve all that are offered."""
    return tuple(kind for kind in ATTENTIONS if kind in offered and kind != base and not _shared(kind, base, offered))


def _shared(kind: BlockAttention, base: BlockAttention, offered: Collection[BlockAttention]) -> bool:
    """Whether the engine that skips serves an attention too, with a threshold of 0.

    The base's does. A further one does where it costs nothing: dense attention has faster kernels than those that can
    skip, while SAGE has the same.
    """
    skipping = SKIPPING.get(kind)
    return skipping == base or (kind != "dense" and skipping in offered)


def served_by(attention: BlockAttention, built: Collection[BlockAttention]) -> BlockAttention:
    """Which of the built engines' attentions serves one: itself, or what skips, with a threshold of 0."""
    return attention if attention in built else SKIPPING[attention]


def weights_of(graph: str) -> str:
    """The graph whose weights a graph reads: its own, or those that it is a variant of."""
    graph = without_sides(graph)
    whole, _, kind = graph.rpartition(".")
    return whole if kind in ATTENTIONS else graph


def graph_name(graph: str, attention: BlockAttention, base: BlockAttention) -> str:
    """The name of a graph that attends otherwise than the profile's base does."""
    return graph if attention == base else f"{graph}.{attention}"
