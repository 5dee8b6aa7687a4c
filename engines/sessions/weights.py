"""The checkpoint's bytes, memory-mapped: one by one as arrays that share them, or in units as a GPU takes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
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
        before 32-bit ones) is copied: kernels may read items whole. So is a rank's part that does not lie together.
        """
        data = self.runs(region, region.nbytes(dtype)).reshape(-1)
        items = data.view(STORAGE[dtype]).reshape(region.shape)
        return items if items.flags.aligned else items.copy()

    def runs(self, region: Region, nbytes: int) -> NDArray[np.uint8]:
        """The weight's bytes as they lie, [runs, bytes of one]; all of them are one run, where no ranks divide it."""
        run, pitch = region.cut or (nbytes, nbytes)
        if not run:
            return np.empty((1, 0), np.uint8)
        # Numpy sees that all of it lies in the file.
        file = self.file(region.file)
        return np.ndarray((nbytes // run, run), np.uint8, buffer=file, offset=region.offset, strides=(pitch, 1))

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

    `units[i]` has the region and the length in bytes of every weight of unit i. A region that several graphs read
    lies there once.
    """

    def __init__(self, mapped: MappedWeights, units: Sequence[dict[WeightName, tuple[Region, int]]]) -> None:
        self._mapped = mapped
        self._starts = tuple(_starts(dict(unit.values())) for unit in units)
        self.offsets = tuple(
            {name: starts[region].offset for name, (region, _) in unit.items()}
            for unit, starts in zip(units, self._starts, strict=True)
        )
        """For each unit, where in it every weight begins."""
        self.sizes = tuple(sum(_aligned(place.nbytes) for place in starts.values()) for starts in self._starts)

    def read(self, unit: int, destination: torch.Tensor) -> None:
        """Writes a unit to host memory, uint8 of its size, from the mapped files."""
        target = destination.numpy()
        for region, (offset, nbytes) in self._starts[unit].items():
            data = self._mapped.runs(region, nbytes)
            target[offset : offset + nbytes].reshape(data.shape)[:] = data


class _Place(NamedTuple):
    """Where in its unit a region lies."""

    offset: int
    nbytes: int


def aligned_offsets(sizes: Iterable[int]) -> list[int]:
    """Where each of some weights begins in one piece of memory, and where that ends, in bytes."""
    return list(itertools.accumulate(map(_aligned, sizes), initial=0))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _starts(sizes: Mapping[Region, int]) -> dict[Region, _Place]:
    offsets = aligned_offsets(sizes.values())
    return {region: _Place(offset, nbytes) for (region, nbytes), offset in zip(sizes.items(), offsets, strict=False)}
