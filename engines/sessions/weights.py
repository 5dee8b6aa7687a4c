"""The checkpoint's bytes, memory-mapped: one by one as arrays that share them, or in units as a GPU takes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engines.sessions.dtypes import STORAGE
from engines.store import Dtype, Region, WeightFile


class MappedWeights:
    """Memory maps of the checkpoint's files, opened when first used."""

    def __init__(self, files: Sequence[WeightFile]) -> None:
        self._files = files
        self._maps: dict[int, NDArray[np.uint8]] = {}

    def array(self, region: Region, dtype: Dtype) -> NDArray[np.generic]:
        """The weight's bytes in its shape, as the numpy type that stores the dtype (bfloat16 as uint16).

        A tensor that does not start at a multiple of its item size (a file may hold an odd number of 16-bit items
        before 32-bit ones) is copied: kernels may read items whole.
        """
        data = self.file(region.file)[region.offset : region.offset + region.nbytes(dtype)]
        items = data.view(STORAGE[dtype]).reshape(region.shape)
        return items if items.flags.aligned else items.copy()

    def file(self, index: int) -> NDArray[np.uint8]:
        """All bytes of one of the manifest's weight files."""
        if index not in self._maps:
            self._maps[index] = np.memmap(self._files[index].path, dtype=np.uint8, mode="r")
        return self._maps[index]


ALIGNMENT = 256
"""Bytes that the address of a weight on a GPU is a multiple of, as TensorRT asks for."""


class WeightName(NamedTuple):
    """A weight of a graph."""

    graph: str
    name: str


class PackedUnits:
    """Units of weights, each laid out in one piece of memory; implements `residency.Source`.

    `units[i]` has the region and the length in bytes of every weight of unit i.
    """

    def __init__(self, mapped: MappedWeights, units: Sequence[dict[WeightName, tuple[Region, int]]]) -> None:
        self._mapped = mapped
        self._units = units
        self.offsets = tuple(_offsets([nbytes for _, nbytes in unit.values()], unit) for unit in units)
        """For each unit, where in it every weight begins."""
        self.sizes = tuple(sum(_aligned(nbytes) for _, nbytes in unit.values()) for unit in units)

    def read(self, unit: int, destination: torch.Tensor) -> None:
        """Writes a unit to host memory, uint8 of its size, from the mapped files."""
        target = destination.numpy()
        for name, (region, nbytes) in self._units[unit].items():
            start = self.offsets[unit][name]
            data = self._mapped.file(region.file)[region.offset : region.offset + nbytes]
            target[start : start + nbytes] = data


def aligned_offsets(sizes: Iterable[int]) -> list[int]:
    """Where each of some weights begins in one piece of memory, and where that ends, in bytes."""
    return list(itertools.accumulate(map(_aligned, sizes), initial=0))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _offsets(sizes: Sequence[int], names: Iterable[WeightName]) -> dict[WeightName, int]:
    return dict(zip(names, aligned_offsets(sizes), strict=False))
