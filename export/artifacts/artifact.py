"""What an artifact does to a transformer, whatever its spelling: a patch for each diffusers parameter it touches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from export.checkpoint.expressions import Weight
from plugins.distilled import Distilled


@dataclass(frozen=True)
class LowRank:
    """A difference of `scale` x up @ down: down [rank, inputs] and up [outputs, rank], over the artifact's tensors."""

    down: Weight
    up: Weight
    scale: float


@dataclass(frozen=True)
class Patch:
    """What becomes of one parameter: W* = cast(float32(W) + scale x up @ down + difference).

    injected: the whole tensor, of a parameter that the base does not have; then it stands alone.
    """

    low_rank: LowRank | None = None
    difference: Weight | None = None
    injected: Weight | None = None


@dataclass(frozen=True)
class Artifact:
    """A checked artifact. `patches` are by diffusers parameter name, rows in diffusers order; nothing is read yet."""

    path: Path
    distilled: Distilled
    patches: Mapping[str, Patch]
    metadata: Mapping[str, str]
