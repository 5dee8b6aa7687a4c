"""The diffusion transformer as engines: what runs once a request, once a schedule step, and every forward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engines.sessions.engine_set import EngineSet
from runtime.events import Cancellation
from runtime.packing import Layout

MODULATION_CACHE_BYTES = 2 << 30
"""Holds one 49-forward schedule at released size: 49 steps x 4 slots x 9.7 MB."""


@dataclass(frozen=True)
class Modulation:
    """AdaLN parameters of one step: `blocks[i]` is [M*3, 6*hidden], `head` is [M, 2*hidden]."""

    blocks: tuple[torch.Tensor, ...]
    head: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the table keeps alive."""
        return self.head.nbytes + sum(block.nbytes for block in self.blocks)


class ModulationCache:
    """Tables by (partition, slot timesteps), least recently used dropped first once `limit` bytes are held."""

    def __init__(self, limit: int = MODULATION_CACHE_BYTES) -> None:
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

    def __len__(self) -> int:
        return len(self._tables)


class Denoiser:
    """One partition's transformer. Its parts are called by the sampling loop in the order of this class."""

    def __init__(self, engines: EngineSet, partition: str, cache: ModulationCache) -> None:
        self._engines = engines
        self._partition = partition
        self._cache = cache
        self._dimensions = engines.manifest.dimensions.denoiser

    def context(self, text: torch.Tensor) -> torch.Tensor:
        """Text rows [L, hidden] from conditioning [L, text_dim]; independent of the timestep, so once a request."""
        return self._run("context", {"text": text})["text_rows"]

    def modulation(self, timesteps: torch.Tensor) -> Modulation:
        """The AdaLN table of one step from its slot timesteps [M] float32, cached across requests."""
        key = (self._partition, *timesteps.tolist())
        table = self._cache.get(key)
        if table is None:
            table = self._compute_modulation(timesteps)
            self._cache.put(key, table)
        return table

    def forward(
        self,
        video_rows: torch.Tensor,
        audio_rows: torch.Tensor,
        text_rows: torch.Tensor,
        layout: Layout,
        modulation: Modulation,
        cancellation: Cancellation,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocity of the video rows [Nv, 96] and of the audio rows [Na, 32], float32.

        Raises `Cancelled` between blocks once `cancellation` is set.
        """
        rows = {"video_rows": video_rows, "audio_rows": audio_rows, "text_rows": text_rows}
        hidden = self._run("prologue", {**rows, "row_order": layout.row_order})["hidden"]
        for index, table in enumerate(modulation.blocks):
            cancellation.check()
            inputs = {"hidden": hidden, "modulation": table, "modulation_index": layout.modulation_index}
            hidden = self._run("block", {**inputs, "cos": layout.cos, "sin": layout.sin}, index)["hidden"]
        head = {"hidden": hidden, "modulation": modulation.head, "timestep_index": layout.slot_index}
        velocity = self._run("epilogue", head)["velocity"]
        return self._split(velocity, layout)

    def _split(self, velocity: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        width = self._dimensions.video_row
        return velocity[layout.video_rows, :width], velocity[layout.audio_rows, width:]

    def _compute_modulation(self, timesteps: torch.Tensor) -> Modulation:
        embedding = self._run("modulation.time", {"timesteps": timesteps})["embedding"]
        tables = list(self._projections(embedding))
        hidden = self._dimensions.hidden
        return Modulation(tuple(table.reshape(-1, 6 * hidden) for table in tables[:-1]), tables[-1])

    def _projections(self, embedding: torch.Tensor) -> Iterator[torch.Tensor]:
        for instance in range(self._dimensions.layers + 1):
            yield self._run("modulation.adaln", {"embedding": embedding}, instance)["modulation"]

    def _run(self, graph: str, inputs: dict[str, torch.Tensor], instance: int = 0) -> dict[str, torch.Tensor]:
        return self._engines.run(graph, inputs, instance=instance, partition=self._partition)
