"""The weights of an adapter's low-rank sides, as every engine that has such sides takes them: one rank, one scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from export.artifacts.artifact import Artifact, LowRank, Patch
from export.artifacts.base import Base
from export.checkpoint import Checkpoint
from export.checkpoint.expressions import Stored, Weight
from export.graphs.block_layout import block_layout
from export.passes.add_low_rank import DOWN, UP
from export.schemes import PLAIN
from export.sidecar import Sidecar, plan_file

PACKED = "ff.net.0.proj"
"""The linear whose rows a checkpoint may hold in another order than diffusers does: two halves, swapped."""


class LowRankError(ValueError):
    """An adapter that is no low-rank side of every block's linears; says where it is not, and what serves it."""


@dataclass(frozen=True)
class SideWeight(Weight):
    """Half of a side: `scale` x a matrix, in float32, padded with zeros to `shape` and cast once; `key` names it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str
    source: Weight
    scale: float

    def leaves(self) -> Iterator[Stored]:
        yield from self.source.leaves()

    def evaluate(self, leaf: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        value = self.source.evaluate(leaf).to(torch.float32) * self.scale
        rows, columns = (whole - part for whole, part in zip(self.shape, value.shape, strict=True))
        return functional.pad(value, (0, columns, 0, rows)).to(self.dtype)


@dataclass(frozen=True)
class LowRankFile:
    """An adapter's file, planned; `tensors` are where each half of each side will lie, by its name."""

    file: Sidecar
    tensors: Mapping[str, Stored]


def low_rank_sides(artifact: Artifact, base: Base) -> dict[str, LowRank]:
    """An adapter's sides, by the diffusers names of their linears: one at every linear of every block.

    What it does to the modulation is left out.

    Raises:
        LowRankError: a linear without a side, or a change that no side can say.
    """
    modulation, wanted = (tuple(f"{n}.weight" for n in names) for names in (base.adaln_linears, base.block_linears))
    kept = {name: patch for name, patch in artifact.patches.items() if name not in modulation}
    other = [name for name, patch in kept.items() if name not in wanted or patch != Patch(patch.low_rank)]
    if other:
        rule = "an adapter that requests choose has low-rank sides of the blocks' linears, and changes nothing else"
        raise LowRankError(f"{artifact.path}: {other[0]}: {rule}; make a model of it with: h3trt adapters fuse")
    found = {n.removesuffix(".weight"): p.low_rank for n, p in kept.items() if p.low_rank is not None}
    if missing := [name for name in base.block_linears if name not in found]:
        raise LowRankError(f"{artifact.path}: {missing[0]}: has no low-rank side; every linear of every block must")
    return found


def modulation_sides(artifact: Artifact, base: Base) -> dict[str, LowRank]:
    """What an adapter adds to AdaLN projections, by their diffusers names; nothing in most. Raises LowRankError."""
    patches = {name: p for name in base.adaln_linears if (p := artifact.patches.get(f"{name}.weight")) is not None}
    for name, patch in patches.items():
        if patch != Patch(patch.low_rank):
            rule = "an adapter that requests choose changes AdaLN by low-rank differences alone"
            raise LowRankError(f"{artifact.path}: {name}: {rule}; make a model of it with: h3trt adapters fuse")
    return {name: patch.low_rank for name, patch in patches.items() if patch.low_rank is not None}


def largest_rank(artifacts: Iterable[Artifact], base: Base) -> int:
    """The rank that serves all of some adapters. Raises LowRankError."""
    sides = (side for artifact in artifacts for side in low_rank_sides(artifact, base).values())
    return max(side.down.shape[0] for side in sides)


def plan_low_rank(
    artifact: Artifact, checkpoint: Checkpoint, partition: str, rank: int, directory: Path
) -> LowRankFile:
    """Plans an adapter's file for a checkpoint's partition, its sides padded to `rank`. Raises LowRankError."""
    sides = low_rank_sides(artifact, Base.of(checkpoint))
    swaps = block_layout(checkpoint, partition).gate_first
    halves = [half for name, side in sides.items() for half in _halves(name, side, rank, swaps)]
    stem = f"adapter.{partition}.{artifact.distilled.name}"
    file = plan_file({half: half.key for half in halves}, PLAIN, directory, stem)
    return LowRankFile(file, {half.key: file.weights[half]["weight"] for half in halves})


def _halves(name: str, side: LowRank, rank: int, swaps: bool) -> tuple[SideWeight, SideWeight]:
    """Both halves of a linear's side; the scale is in the second."""
    up, outputs = side.up, side.up.shape[0]
    if swaps and name.endswith(PACKED):
        up = Weight.concat([up.rows(outputs // 2, outputs), up.rows(0, outputs // 2)])
    return (
        SideWeight((rank, side.down.shape[1]), torch.bfloat16, f"{name}.{DOWN}", side.down, 1.0),
        SideWeight((outputs, rank), torch.bfloat16, f"{name}.{UP}", up, side.scale),
    )
