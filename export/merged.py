"""The stored tensors of a transformer with low-rank differences merged into them, however the checkpoint packs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from export.artifacts.artifact import LowRank, Patch
from export.artifacts.patched import Addition, added
from export.checkpoint import Checkpoint
from export.checkpoint.components import denoiser
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.recipes import Projection, QKVLayout, Recipe, Whole, runs


@dataclass(frozen=True)
class MergedWeight(Weight):
    """A stored tensor with the patches of the diffusers parameters that are made of it, each by its recipe."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    base: Stored
    patches: tuple[tuple[Recipe, Patch], ...]
    layout: QKVLayout

    def leaves(self) -> Iterator[Stored]:
        yield self.base
        for _, patch in self.patches:
            for weight in added(patch):
                yield from weight.leaves()

    def evaluate(self, leaf: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        base = leaf(self.base)
        value = base.clone()
        for recipe, patch in self.patches:
            addition, rows = Addition.of(patch, leaf), base.shape[0]
            for run in runs(recipe, rows // 3 if isinstance(recipe, Projection) else rows, self.layout):
                here = slice(run.stored, run.stored + run.rows)
                value[here] = addition.to(base[here], run.parameter)
        return value


def merged_weights(checkpoint: Checkpoint, partition: str, sides: Mapping[str, LowRank]) -> dict[str, MergedWeight]:
    """The stored tensors that low-rank differences change, by key; `sides` are by diffusers names, less `.weight`."""
    stored, layout = checkpoint.stored("denoiser", partition), checkpoint.qkv_layout("denoiser", partition)
    config = denoiser.DenoiserConfig.model_validate(checkpoint.config("denoiser", partition))
    recipes = denoiser.recipes(config) if checkpoint.layout == "native" else {}
    changes: dict[str, list[tuple[Recipe, Patch]]] = {}
    for name, side in sides.items():
        recipe = recipes.get(f"{name}.weight", Whole(f"{name}.weight"))
        changes.setdefault(recipe.key, []).append((recipe, Patch(side)))
    return {
        key: MergedWeight(stored[key].shape, stored[key].dtype, stored[key], tuple(patches), layout)
        for key, patches in changes.items()
    }


def exchanged(weights: Mapping[str, Weight], changed: Mapping[str, Weight]) -> dict[str, Weight]:
    """An instance's weights, by name, with others in place of the stored tensors of some keys."""
    return {n: changed.get(w.key, w) if isinstance(w, Stored) else w for n, w in weights.items()}
