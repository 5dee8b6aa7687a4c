"""How a diffusers parameter is made from native tensors, and back: whole, one of fused q, k, v, or swapped halves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.safetensors_file import Declared

QKVLayout = Literal["split", "interleaved", "stacked"]
"""Rows of the attention projections: three tensors, or one fused with q, k, v per head, or one with all q first."""


@dataclass(frozen=True)
class Whole:
    """The native tensor as it is."""

    key: str


@dataclass(frozen=True)
class Projection:
    """Rows of a fused q, k, v weight or bias: `index` 0 is q, 1 is k, 2 is v."""

    key: str
    index: int
    heads: int


@dataclass(frozen=True)
class Swapped:
    """The native [gate; up] rows as diffusers' [up; gate]."""

    key: str


Recipe = Whole | Projection | Swapped


def expression(recipe: Recipe, stored: Mapping[str, Stored], layout: QKVLayout) -> Weight:
    """The diffusers parameter as an expression over the native tensors."""
    source = stored[recipe.key]
    match recipe:
        case Whole():
            return source
        case Swapped():
            half = source.shape[0] // 2
            return Weight.concat([source.rows(half, 2 * half), source.rows(0, half)])
        case Projection(index=index, heads=heads):
            return _projection(source, index, heads, layout)


def _projection(fused: Weight, index: int, heads: int, layout: QKVLayout) -> Weight:
    rows, inputs = fused.shape[0] // 3, fused.shape[1:]
    if layout == "stacked":
        return fused.rows(index * rows, (index + 1) * rows)
    per_head = fused.view(heads, 3, rows // heads, *inputs)
    return per_head.select(1, index).view(rows, *inputs)


@dataclass(frozen=True)
class Run:
    """Rows of a parameter that lie together in the stored tensor: where they begin in each, and how many they are."""

    parameter: int
    stored: int
    rows: int


def runs(recipe: Recipe, rows: int, layout: QKVLayout) -> tuple[Run, ...]:
    """Where the rows of a diffusers parameter, of which there are so many, lie in the native tensor."""
    match recipe:
        case Whole():
            return (Run(0, 0, rows),)
        case Swapped():
            half = rows // 2
            return Run(0, half, half), Run(half, 0, half)
        case Projection(index=index, heads=heads):
            if layout == "stacked":
                return (Run(0, index * rows, rows),)
            size = rows // heads
            return tuple(Run(head * size, (3 * head + index) * size, size) for head in range(heads))


def native_declarations(tensors: Mapping[str, Declared], recipes: Mapping[str, Recipe]) -> dict[str, Declared]:
    """What the native files must hold, given what the diffusers parameters are."""
    declared: dict[str, Declared] = {}
    for name, recipe in recipes.items():
        one = tensors[name]
        if isinstance(recipe, Projection) and one.shape is not None:
            one = Declared((3 * one.shape[0], *one.shape[1:]), one.dtype)
        declared[recipe.key] = one
    return declared


def to_native(values: Mapping[str, torch.Tensor], recipes: Mapping[str, Recipe]) -> dict[str, torch.Tensor]:
    """Packs diffusers parameters into the native release's tensors (q, k, v interleaved per head)."""
    packed: dict[str, torch.Tensor] = {}
    projections: dict[str, list[torch.Tensor]] = {}
    for name, recipe in recipes.items():
        value = values[name]
        match recipe:
            case Whole(key=key):
                packed[key] = value
            case Swapped(key=key):
                packed[key] = torch.cat(tuple(reversed(value.chunk(2))))
            case Projection(key=key, heads=heads):
                projections.setdefault(key, []).append(value.reshape(heads, -1, *value.shape[1:]))
    for key, parts in projections.items():
        packed[key] = torch.stack(parts, dim=1).flatten(0, 2)
    return packed
