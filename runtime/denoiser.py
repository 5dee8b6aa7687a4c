"""The diffusion transformer as engines: what runs once a request, once a schedule step, and every forward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engines.sessions.engine_set import EngineSet
from engines.store import Partition
from runtime.events import Cancellation, Reporter
from runtime.packing import Layout, rotary_tables
from runtime.sampler import euler_step
from runtime.schedule import Schedule


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

    def __len__(self) -> int:
        return len(self._tables)


@dataclass(frozen=True, eq=False)
class Sequence:
    """What a request's forwards share: text rows [L, hidden], the row layout, rotary cos and sin [S, 48] float32."""

    text_rows: torch.Tensor
    layout: Layout
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, eq=False)
class State:
    """The rows being denoised, float32 in packed row layout: video [Nv, 96] and audio [2A, 32]."""

    video: torch.Tensor
    audio: torch.Tensor


class Denoiser:
    """One partition's transformer and its sampling loop."""

    def __init__(self, engines: EngineSet, partition: Partition, cache: ModulationCache) -> None:
        self._engines = engines
        self._partition = partition
        self._cache = cache
        self._dimensions = engines.manifest.dimensions.denoiser

    def sequence(self, text: torch.Tensor, layout: Layout) -> Sequence:
        """Everything independent of state and timestep, from conditioning [L, text_dim]: computed once a request."""
        dimensions = self._dimensions
        cos, sin = rotary_tables(layout.position_ids, dimensions.rope_frequencies, dimensions.rope_theta)
        return Sequence(self._run("context", {"text": text})["text_rows"], layout, cos, sin)

    def sample(
        self, sequence: Sequence, schedule: Schedule, state: State, report: Reporter, cancellation: Cancellation
    ) -> Iterator[State]:
        """Yields the state after each Euler step; the last one is the clean latents' rows.

        Raises `Cancelled` between blocks once `cancellation` is set.
        """
        report("denoise", 0, schedule.forwards)
        for step, timesteps in enumerate(schedule.slots()):
            video, audio = self._velocity(sequence, self.modulation(timesteps), state, cancellation)
            state = State(
                euler_step(schedule.video, step, state.video, video),
                euler_step(schedule.audio, step, state.audio, audio),
            )
            report("denoise", step + 1, schedule.forwards)
            yield state

    def modulation(self, timesteps: torch.Tensor) -> Modulation:
        """The AdaLN table of one step from its slot timesteps [M] float32, cached across requests."""
        key = (self._partition, *timesteps.tolist())
        table = self._cache.get(key)
        if table is None:
            table = self._compute_modulation(timesteps)
            self._cache.put(key, table)
        return table

    def _velocity(
        self, sequence: Sequence, modulation: Modulation, state: State, cancellation: Cancellation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout = sequence.layout
        rows = {"video_rows": state.video, "audio_rows": state.audio, "text_rows": sequence.text_rows}
        hidden = self._run("prologue", {**rows, "row_order": layout.row_order})["hidden"]
        shared = {"modulation_index": layout.modulation_index, "cos": sequence.cos, "sin": sequence.sin}
        for index, table in enumerate(modulation.blocks):
            cancellation.raise_if_cancelled(f"transformer block {index + 1} of {len(modulation.blocks)}")
            hidden = self._run("block", {"hidden": hidden, "modulation": table, **shared}, index)["hidden_out"]
        head = {"hidden": hidden, "modulation": modulation.head, "timestep_index": layout.timestep_index}
        velocity = self._run("epilogue", head)["velocity"]
        width = self._dimensions.video_row
        return velocity[layout.target_video, :width], velocity[layout.target_audio, width:]

    def _compute_modulation(self, timesteps: torch.Tensor) -> Modulation:
        embedding = self._run("modulation.time", {"timesteps": timesteps})["embedding"]
        *blocks, head = (
            self._run("modulation.adaln", {"embedding": embedding}, instance)["modulation"]
            for instance in range(self._dimensions.layers + 1)
        )
        width = 6 * self._dimensions.hidden
        return Modulation(tuple(table.reshape(-1, width) for table in blocks), head)

    def _run(self, graph: str, inputs: dict[str, torch.Tensor], instance: int = 0) -> dict[str, torch.Tensor]:
        return self._engines.run(graph, inputs, instance=instance, partition=self._partition)
