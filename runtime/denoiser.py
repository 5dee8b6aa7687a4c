"""The diffusion transformer as engines: what runs once a request, once a schedule step, and every forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from engines.adapters import weights_key
from engines.sessions.dtypes import TORCH
from engines.sessions.engine_set import EngineSet
from engines.sessions.modulation import ADALN, MODULATION, embeddings, projections
from engines.store import Partition
from plugins.ranks import Group
from plugins.schedule import Schedule
from runtime.attention import BlocksAttention
from runtime.block import Blocks, Sharing, open_blocks
from runtime.events import Units
from runtime.modulation import Modulation, ModulationCache, StoredTables
from runtime.packing import Layout, rotary_tables
from runtime.quality import Quality
from runtime.row_shares import RowShare
from runtime.sampler import euler_step
from runtime.video_tiles import VideoTiles, video_tiles


@dataclass(frozen=True, eq=False)
class Sequence:
    """What a request's forwards share, on the engines' device.

    share: the rows of the packed sequence that are here, all of them where no ranks share it. Of these: text_rows
    [l, hidden]; timestep_index and modulation_index [n] int64, as in the layout; rotary cos and sin [n, 48] float32.
    target_video and target_audio: the generated rows of the whole sequence; condition_rows: of video and audio, those
    that come first in the layout's streams; tiles: those that a student attends to, if it does; adapter: what the
    transformer is changed by.
    """

    share: RowShare
    text_rows: torch.Tensor
    timestep_index: torch.Tensor
    modulation_index: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    target_video: slice
    target_audio: slice
    condition_rows: tuple[int, int]
    tiles: VideoTiles | None = None
    adapter: str | None = None


@dataclass(frozen=True, eq=False)
class State:
    """Rows of both streams, float32 in packed row layout on one device: video [Nv, 96] and audio [2A, 32]."""

    video: torch.Tensor
    audio: torch.Tensor

    def to(self, device: torch.device) -> State:
        """The same on a device."""
        return State(self.video.to(device), self.audio.to(device))

    @property
    def rows(self) -> tuple[int, int]:
        """How many of video and of audio."""
        return len(self.video), len(self.audio)


class Denoiser:
    """One partition's transformer and its sampling loop.

    Ranks may share its rows. Each has the whole state, which is small, embeds and carries through the blocks its own
    rows alone, and gathers the velocity of all of them: the states that follow are the same on all, bit for bit.
    """

    def __init__(
        self,
        engines: EngineSet,
        partition: Partition,
        cache: ModulationCache,
        stored: Mapping[str, StoredTables],
        ranks: Group | None = None,
    ) -> None:
        """stored: the tables that the store has, by its keys. ranks: those that share the rows."""
        self._engines = engines
        self._partition = partition
        self._cache = cache
        self._stored = stored
        self._ranks = ranks
        self._dimensions = engines.manifest.dimensions.denoiser

    def sequence(self, text: torch.Tensor, layout: Layout, adapter: str | None = None) -> Sequence:
        """Everything independent of state and timestep, from conditioning [L, text_dim]: computed once a request.

        Conditioning may come in the text encoder's dtype; it is cast to the one that `context` takes. adapter: the one
        that the request has chosen, for its forwards too.
        """
        dimensions, device = self._dimensions, self._engines.device
        (spec,) = self._engines.manifest.graphs["context"].inputs
        with self._engines.stage(("context",)):
            given = {"text": text.to(device, TORCH[spec.dtype])}
            text_rows = self._engines.run("context", given, 0, self._partition, adapter=adapter)["text_rows"]
        cos, sin = rotary_tables(layout.position_ids, dimensions.rope_frequencies, dimensions.rope_theta)
        rank, local = 0, layout.rows
        if self._ranks is not None:
            rank, local = self._ranks.rank, self._engines.manifest.profile.local_rows(layout.rows)
        share = RowShare.of(layout, local, rank).to(device)
        return Sequence(
            share,
            share.of_stream("text", text_rows),
            share.of_packed(layout.timestep_index).to(device),
            share.of_packed(layout.modulation_index).to(device),
            share.of_packed(cos).to(device),
            share.of_packed(sin).to(device),
            layout.target_video,
            layout.target_audio,
            (layout.condition_video, layout.condition_audio),
            self._tiles(layout),
            adapter,
        )

    def _tiles(self, layout: Layout) -> VideoTiles | None:
        student = self._engines.manifest.student
        if student is None or student.video_sparse is None:
            return None
        return video_tiles(layout, student.video_sparse.sparsity).to(self._engines.device)

    def sample(
        self,
        sequence: Sequence,
        schedule: Schedule,
        quality: Quality,
        conditions: State,
        state: State,
        units: Units,
    ) -> Iterator[State]:
        """Yields the state after each Euler step, on the engines' device; the last one is the clean latents' rows.

        conditions: rows that every step sees and none changes. The schedule's tables are computed before its first
        step, unless the store has them. One unit a step; raises `Cancelled` between blocks too, and ValueError when
        conditions are not as many as the layout's. After the last step, the tiles that attention has left out are told,
        if it may leave out any.
        """
        if conditions.rows != sequence.condition_rows:
            raise ValueError(f"conditions: {conditions.rows} rows, the layout has {sequence.condition_rows}")
        conditions, state = (rows.to(self._engines.device) for rows in (conditions, state))
        rows = {"modulation_index": sequence.modulation_index, "cos": sequence.cos, "sin": sequence.sin}
        attention = BlocksAttention(self._engines, sequence.tiles)
        sharing = Sharing(self._ranks, sequence.share.rows) if self._ranks is not None else None
        blocks = open_blocks(self._engines, self._partition, rows, attention, sequence.adapter, sharing)
        slots = schedule.slots()
        stored = self._stored.get(weights_key(self._partition, sequence.adapter))
        if stored is None:
            self._fill_cache(slots, units)
        for step, timesteps in enumerate(slots):
            with units.one(f"forward {step + 1} of {schedule.forwards}"):
                table = self.modulation(timesteps, units) if stored is None else stored.step(timesteps)
                table = table.to(self._engines.device)
                attention.use(quality.forward(step))
                video, audio = self._velocity(sequence, blocks, table, conditions, state, units)
                state = State(
                    euler_step(schedule.video, step, state.video, video),
                    euler_step(schedule.audio, step, state.audio, audio),
                )
            yield state
        if quality.skips:
            units.tell_skipped(attention.skipped(self._ranks))

    def modulation(self, timesteps: torch.Tensor, units: Units) -> Modulation:
        """The AdaLN table of one step from its slot timesteps [M] float32, in host memory, cached across requests."""
        table = self._cache.get(self._key(timesteps))
        if table is None:
            (table,) = self._tables([timesteps], units)
            self._cache.put(self._key(timesteps), table)
        return table

    def _key(self, timesteps: torch.Tensor) -> tuple[object, ...]:
        return self._partition, *timesteps.tolist()

    def _fill_cache(self, slots: torch.Tensor, units: Units) -> None:
        """Computes what the cache lacks of the tables of all steps [forwards, M], if it can hold them."""
        (spec,) = self._engines.manifest.graphs[ADALN].outputs
        nbytes = len(slots) * self._dimensions.table_elements * TORCH[spec.dtype].itemsize
        missing = [timesteps for timesteps in slots if self._cache.get(self._key(timesteps)) is None]
        if missing and self._cache.has_room(nbytes):
            for timesteps, table in zip(missing, self._tables(missing, units), strict=True):
                self._cache.put(self._key(timesteps), table)

    def _velocity(
        self,
        sequence: Sequence,
        blocks: Blocks,
        modulation: Modulation,
        conditions: State,
        state: State,
        units: Units,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        share = sequence.share
        streams = {
            "video_rows": share.of_stream("video", torch.cat([conditions.video, state.video])),
            "audio_rows": share.of_stream("audio", torch.cat([conditions.audio, state.audio])),
            "text_rows": sequence.text_rows,
        }
        hidden = self._run("prologue", {**streams, "row_order": share.row_order})["hidden"]
        for index, table in enumerate(modulation.blocks):
            units.check(f"transformer block {index + 1} of {len(modulation.blocks)}")
            hidden = blocks.run(index, hidden, table)
        head = {"hidden": hidden, "modulation": modulation.head, "timestep_index": sequence.timestep_index}
        velocity = self._run("epilogue", head)["velocity"]
        if self._ranks is not None:
            velocity = self._ranks.gather_rows(velocity, share.rows)
        width = self._dimensions.video_row
        return velocity[sequence.target_video, :width], velocity[sequence.target_audio, width:]

    def _tables(self, steps: list[torch.Tensor], units: Units) -> list[Modulation]:
        """The tables of some steps, layer by layer: a profile may have each layer's weights come from the host."""
        layers = []
        with self._engines.stage(MODULATION):
            embedded = embeddings(self._run, steps)
            for instance in range(self._dimensions.layers + 1):
                units.check(f"modulation {instance + 1} of {self._dimensions.layers + 1}")
                layers.append(projections(self._run, embedded, instance))
        width = 6 * self._dimensions.hidden
        return [
            Modulation(tuple(table.reshape(-1, width) for table in blocks), head)
            for *blocks, head in zip(*layers, strict=True)
        ]

    def _run(self, graph: str, inputs: dict[str, torch.Tensor], instance: int = 0) -> dict[str, torch.Tensor]:
        return self._engines.run(graph, inputs, instance=instance, partition=self._partition)
