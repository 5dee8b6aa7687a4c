"""Encoded pictures as named tensors, and back: so they reach the ranks that have no vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.encoder import Placed
from runtime.presentation import VisionBlock
from runtime.vision import Picture


def to_tensors(placed: Sequence[Placed]) -> dict[str, torch.Tensor]:
    """The rows of each picture by its place, and those that it adds to the first layers' by their layer."""
    named = {}
    for place, one in enumerate(placed):
        named[_rows(place)] = one.picture.rows
        named |= {_deepstack(place, layer): rows for layer, rows in enumerate(one.picture.deepstack)}
    return named


def from_tensors(blocks: Sequence[VisionBlock], named: Mapping[str, torch.Tensor]) -> list[Placed]:
    """The inverse, for the vision blocks that the pictures stand in; other tensors may be among them."""
    placed = []
    for place, block in enumerate(blocks):
        layers = sum(name.startswith(_deepstack(place, "")) for name in named)
        deepstack = tuple(named[_deepstack(place, layer)] for layer in range(layers))
        placed.append(Placed(Picture((block.grid[1], block.grid[2]), named[_rows(place)], deepstack), block.first_row))
    return placed


def _rows(place: int) -> str:
    return f"picture.{place}.rows"


def _deepstack(place: int, layer: int | str) -> str:
    return f"picture.{place}.deepstack.{layer}"
