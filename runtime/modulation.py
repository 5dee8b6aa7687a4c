"""AdaLN tables, one for each step of a schedule: kept between requests, or in the store from the start."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engines.sessions.dtypes import STORAGE, TORCH
from engines.store import Dtype, Extent, Manifest, StoreError, TableRecord, rebuild_advice


@dataclass(frozen=True)
class Modulation:
    """AdaLN parameters of one step: `blocks[i]` is [M*3, 6*hidden], `head` is [M, 2*hidden]."""

    blocks: tuple[torch.Tensor, ...]
    head: torch.Tensor

    def to(self, device: torch.device) -> Modulation:
        """The same on a device."""
        return Modulation(tuple(block.to(device) for block in self.blocks), self.head.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes that the table keeps alive."""
        return self.head.nbytes + sum(block.nbytes for block in self.blocks)


class ModulationCache:
    """Tables in host memory by (partition, slot timesteps), least recently used dropped first beyond `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._tables: OrderedDict[tuple[object, ...], Modulation] = OrderedDict()

    def get(self, key: tuple[object, ...]) -> Modulation | None:
        """The table stored under `key`, marked as used, or None."""
        if key in self._tables:
            self._tables.move_to_end(key)
        return self._tables.get(key)

    def put(self, key: tuple[object, ...], table: Modulation) -> None:
        """Stores `table`; one that alone exceeds the limit is not kept."""
        if table.nbytes > self._limit:
            return
        self._tables[key] = table
        self._held += table.nbytes
        while self._held > self._limit:
            _, dropped = self._tables.popitem(last=False)
            self._held -= dropped.nbytes

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes of tables can be held at once."""
        return nbytes <= self._limit

    def __len__(self) -> int:
        return len(self._tables)


class StoredTables:
    """The tables of a pinned schedule, mapped from the store's file."""

    def __init__(self, store: Path, name: str, record: TableRecord) -> None:
        """Opens the file of `tables[name]` of a store that has been verified."""
        # Written to by nobody: without a copy, torch would warn of a tensor that cannot be.
        data = np.memmap(store / record.file.path, dtype=np.uint8, mode="c")
        self._blocks, self._head = (_mapped(data, extent, record.dtype) for extent in (record.blocks, record.head))
        self._steps = {timesteps: step for step, timesteps in enumerate(record.timesteps)}
        self._store, self._name = store, name

    def step(self, timesteps: torch.Tensor) -> Modulation:
        """The table of the step that has these slot timesteps [M] float32, in host memory.

        Raises:
            StoreError: the store's tables are of another schedule.
        """
        slots = tuple(timesteps.tolist())
        if slots not in self._steps:
            raise StoreError(
                f"{self._store}: tables.{self._name}: has no step of timesteps {slots}; {rebuild_advice(self._store)}"
            )
        step = self._steps[slots]
        return Modulation(self._blocks[step].unbind(), self._head[step])


def stored_tables(store: Path, manifest: Manifest) -> Mapping[str, StoredTables]:
    """All tables of a verified store, by its keys."""
    return {name: StoredTables(store, name, record) for name, record in manifest.tables.items()}


def _mapped(data: np.memmap, extent: Extent, dtype: Dtype) -> torch.Tensor:
    items = int(np.prod(extent.shape)) * TORCH[dtype].itemsize
    array = data[extent.offset : extent.offset + items].view(STORAGE[dtype]).reshape(extent.shape)
    return torch.from_numpy(array).view(TORCH[dtype])
