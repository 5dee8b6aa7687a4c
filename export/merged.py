"""The stored tensors of a transformer with low-rank differences merged into them, however the checkpoint packs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from export.artifacts.artifact import LowRank
from export.checkpoint import Checkpoint
from export.checkpoint.components import denoiser
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.recipes import Projection, QKVLayout, Recipe, Swapped, Whole


@dataclass(frozen=True)
class Difference:
    """What is added to one diffusers parameter, and how that is made from the stored tensor."""

    recipe: Recipe
    low_rank: LowRank

    def evaluate(self, leaf: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        """Scale x up @ down, float32, rows in diffusers' order."""
        up, down = (each.evaluate(leaf).to(torch.float32) for each in (self.low_rank.up, self.low_rank.down))
        return (self.low_rank.scale * up) @ down


@dataclass(frozen=True)
class MergedWeight(Weight):
    """W* = cast(float32(W) + difference), one cast from the stored tensor's values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    base: Stored
    differences: tuple[Difference, ...]
    layout: QKVLayout

    def leaves(self) -> Iterator[Stored]:
        yield self.base
        for difference in self.differences:
            yield from difference.low_rank.down.leaves()
            yield from difference.low_rank.up.leaves()

    def evaluate(self, leaf: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        value = leaf(self.base).to(torch.float32)
        for difference in self.differences:
            self._add(value, difference.recipe, difference.evaluate(leaf))
        return value.to(self.dtype)

    def _add(self, value: torch.Tensor, recipe: Recipe, difference: torch.Tensor) -> None:
        """Adds a parameter's difference to the rows that make it."""
        rows = value.shape[0]
        match recipe:
            case Whole():
                value += difference
            case Swapped():
                value += difference.roll(rows // 2, 0)
            case Projection(index=index) if self.layout == "stacked":
                value[index * rows // 3 : (index + 1) * rows // 3] += difference
            case Projection(index=index, heads=heads):
                value.view(heads, 3, -1, value.shape[1])[:, index] += difference.view(heads, -1, value.shape[1])


def merged_weights(checkpoint: Checkpoint, partition: str, sides: Mapping[str, LowRank]) -> dict[str, MergedWeight]:
    """The stored tensors that low-rank differences change, by key; `sides` are by diffusers names, less `.weight`."""
    stored, layout = checkpoint.stored("denoiser", partition), checkpoint.qkv_layout("denoiser", partition)
    config = denoiser.DenoiserConfig.model_validate(checkpoint.config("denoiser", partition))
    recipes = denoiser.recipes(config) if checkpoint.layout == "native" else {}
    changes: dict[str, list[Difference]] = {}
    for name, side in sides.items():
        recipe = recipes.get(f"{name}.weight", Whole(f"{name}.weight"))
        changes.setdefault(recipe.key, []).append(Difference(recipe, side))
    return {
        key: MergedWeight(stored[key].shape, stored[key].dtype, stored[key], tuple(differences), layout)
        for key, differences in changes.items()
    }
