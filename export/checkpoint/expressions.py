"""Lazy weight expressions: what a parameter is, in terms of tensors as they lie in the checkpoint's files.

An expression is evaluated in three places with the same code: on memory-mapped tensors (`materialise`), on fake
tensors while a graph is traced, and inside the traced graph itself, where the leaves are the graph's weight inputs
and the views become reshape nodes. So a layout difference costs a reshape, never a copy of the weights on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from plugins.cut import Cut


class Weight:
    """One tensor, described but not read. Immutable; `shape` and `dtype` are known without touching the data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def leaves(self) -> Iterator[Stored]:
        """The stored tensors this expression reads, in evaluation order (a tensor may repeat)."""
        raise TypeError(f"{type(self).__name__} must define leaves()")

    def evaluate(self, leaf: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        """The value, given the value of each stored tensor. Works on real, fake and traced tensors."""
        raise TypeError(f"{type(self).__name__} must define evaluate()")

    def view(self, *shape: int) -> Weight:
        """Reinterprets the shape, as `torch.Tensor.reshape` does."""
        return _apply(self, lambda x: x.reshape(shape))

    def select(self, dim: int, index: int) -> Weight:
        """Takes one index along `dim` and drops that axis."""
        return _apply(self, lambda x: x.select(dim, index))

    def rows(self, start: int, stop: int) -> Weight:
        """Takes rows [start, stop) of the first axis."""
        return _apply(self, lambda x: x[start:stop])

    @staticmethod
    def concat(parts: list[Weight]) -> Weight:
        """Joins along the first axis."""
        meta = torch.cat([_meta(p) for p in parts])
        return Concat(tuple(meta.shape), meta.dtype, tuple(parts))

    @staticmethod
    def weight_normed(direction: Weight, gain: Weight) -> Weight:
        """A weight-normalised tensor; `gain` has one value for each index of the first axis, and that axis's rank."""
        return WeightNormed(direction.shape, direction.dtype, direction, gain)


@dataclass(frozen=True)
class Stored(Weight):
    """A tensor as it lies in a safetensors file: `nbytes` from `offset` from the start of `file`, row-major.

    With a `cut` it is the first rank's part of such a tensor, whose bytes do not lie together.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str
    file: Path
    offset: int
    nbytes: int
    cut: Cut | None = None

    @property
    def span(self) -> int:
        """Bytes of the file from its first to its last."""
        return self.cut.span(self.nbytes) if self.cut else self.nbytes

    def leaves(self) -> Iterator[Stored]:
        yield self

    def evaluate(self, leaf: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        return leaf(self)

    def slab(self, start: int, stop: int) -> Stored:
        """Rows [start, stop) of the first axis, which lie together, as a stored tensor of their own."""
        row = self.nbytes // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return Stored(shape, self.dtype, self.key, self.file, self.offset + start * row, (stop - start) * row)

    def share(self, ranks: int, dim: int, groups: int = 1) -> Stored:
        """The first rank's part, where `ranks` divide each of the `groups` equal parts that the tensor has along `dim`.

        Raises:
            ValueError: they do not divide it, or it is a part already.
        """
        if self.cut is not None or self.shape[dim] % (groups * ranks):
            raise ValueError(f"{self.file}: {self.key} {list(self.shape)}: {ranks} ranks do not divide axis {dim}")
        shape = (*self.shape[:dim], self.shape[dim] // ranks, *self.shape[dim + 1 :])
        pitch = self.nbytes // (groups * prod(self.shape[:dim]))
        cut = Cut(pitch // ranks, pitch)
        return Stored(shape, self.dtype, self.key, self.file, self.offset, self.nbytes // ranks, cut)


@dataclass(frozen=True)
class Mapped(Weight):
    """A view of another expression (reshape, select, slice)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Weight
    function: Callable[[torch.Tensor], torch.Tensor]

    def leaves(self) -> Iterator[Stored]:
        yield from self.source.leaves()

    def evaluate(self, leaf: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        return self.function(self.source.evaluate(leaf))


@dataclass(frozen=True)
class Concat(Weight):
    """Parts joined along the first axis."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Weight, ...]

    def leaves(self) -> Iterator[Stored]:
        for part in self.parts:
            yield from part.leaves()

    def evaluate(self, leaf: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.evaluate(leaf) for part in self.parts])


@dataclass(frozen=True)
class WeightNormed(Weight):
    """`direction * gain / norm`, the norm over all axes of `direction` but the first (weight normalisation)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    direction: Weight
    gain: Weight

    def leaves(self) -> Iterator[Stored]:
        yield from self.direction.leaves()
        yield from self.gain.leaves()

    def evaluate(self, leaf: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        direction, gain = self.direction.evaluate(leaf), self.gain.evaluate(leaf)
        axes = tuple(range(1, direction.ndim))
        return direction * (gain / torch.linalg.vector_norm(direction, dim=axes, keepdim=True))


def _meta(weight: Weight) -> torch.Tensor:
    return torch.empty(weight.shape, dtype=weight.dtype, device="meta")


def _apply(weight: Weight, function: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    meta = function(_meta(weight))
    return Mapped(tuple(meta.shape), meta.dtype, weight, function)
