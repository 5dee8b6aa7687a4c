"""A parameter with an artifact's patch, as an expression: W* = cast(float32(W) + scale x up @ down + difference)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from export.artifacts.artifact import Artifact, Patch
from export.checkpoint.expressions import Stored, Weight


@dataclass(frozen=True)
class Patched(Weight):
    """A base weight and what a patch adds to it: summed in float32, rounded once to the base's dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    base: Weight
    patch: Patch

    def leaves(self) -> Iterator[Stored]:
        yield from self.base.leaves()
        for weight in added(self.patch):
            yield from weight.leaves()

    def evaluate(self, leaf: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        return Addition.of(self.patch, leaf).to(self.base.evaluate(leaf), 0)


@dataclass(frozen=True)
class Addition:
    """A patch's tensors in float32: down [rank, inputs], up [outputs, rank], difference as the parameter."""

    scale: float
    down: torch.Tensor | None
    up: torch.Tensor | None
    difference: torch.Tensor | None

    @staticmethod
    def of(patch: Patch, leaf: Callable[[Stored], torch.Tensor]) -> Addition:
        """The tensors of a patch that stands for a change."""
        pair = patch.low_rank
        return Addition(
            scale=pair.scale if pair else 0.0,
            down=pair.down.evaluate(leaf).float() if pair else None,
            up=pair.up.evaluate(leaf).float() if pair else None,
            difference=None if patch.difference is None else patch.difference.evaluate(leaf).float(),
        )

    def to(self, base: torch.Tensor, start: int) -> torch.Tensor:
        """Rows of the base, those of the parameter from `start` on, with what belongs to them added."""
        total, rows = base.float(), slice(start, start + base.shape[0])
        if self.up is not None and self.down is not None:
            total = torch.addmm(total, self.up[rows], self.down, alpha=self.scale)
        if self.difference is not None:
            total = total + self.difference[rows]
        return total.to(base.dtype)


def added(patch: Patch) -> tuple[Weight, ...]:
    """The tensors of a patch that are added to the base, in the order in which they are."""
    pair = () if patch.low_rank is None else (patch.low_rank.down, patch.low_rank.up)
    return pair if patch.difference is None else (*pair, patch.difference)


def patched_parameters(artifact: Artifact, parameters: Mapping[str, Weight]) -> dict[str, Weight]:
    """A transformer's parameters, by diffusers name, with all patches; those that are injected are among them."""
    found = dict(parameters)
    for name, patch in artifact.patches.items():
        if patch.injected is not None:
            found[name] = patch.injected
        else:
            base = parameters[name]
            found[name] = Patched(base.shape, base.dtype, base, patch)
    return found
