"""The transformer's blocks on a store's engines: whole, or in segments that take the sequence in chunks of rows.

Between segments, ranks that share the rows exchange: rows of all heads for all rows of some heads, and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from engines.sessions.engine_set import EngineSet
from engines.store import Manifest, Partition, TensorRecord
from plugins.exchanges import GROUP, SEQUENCE
from plugins.ranks import Group, handle_of
from runtime.attention import BlocksAttention, variants

WHOLE = ("block",)
SEGMENTS = ("block.project", "block.attend", "block.finish")


class Blocks(Protocol):
    """All blocks of one partition over the rows of one request."""

    def run(self, index: int, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Hidden [S, D] after block `index`, whose modulation table is [M*3, 6*D]; lives until the next but one run."""


@dataclass(frozen=True)
class Sharing:
    """The ranks that hold a sequence of `rows` packed rows between them, and this rank's part in their exchanges."""

    group: Group
    rows: int


def block_graphs(manifest: Manifest) -> tuple[str, ...]:
    """The graphs that a store's blocks consist of."""
    return (*_parts(manifest), *variants(manifest))


def _parts(manifest: Manifest) -> tuple[str, ...]:
    return SEGMENTS if SEGMENTS[0] in manifest.graphs else WHOLE


def open_blocks(
    engines: EngineSet,
    partition: Partition,
    rows: Mapping[str, torch.Tensor],
    attention: BlocksAttention,
    adapter: str | None = None,
    sharing: Sharing | None = None,
) -> Blocks:
    """The blocks over rows whose `modulation_index` [S], `cos` and `sin` [S, 48] are given.

    `attention` says at every run how they attend; `adapter` changes them. `sharing`: the rows are some of a sequence's.
    """
    if _parts(engines.manifest) == SEGMENTS:
        return SegmentedBlocks(engines, partition, rows, attention, adapter, sharing)
    return WholeBlocks(engines, partition, rows, attention, adapter, sharing)


class WholeBlocks:
    """A block is one engine, inside of which ranks that share the rows exchange."""

    def __init__(
        self,
        engines: EngineSet,
        partition: Partition,
        rows: Mapping[str, torch.Tensor],
        attention: BlocksAttention,
        adapter: str | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._run = partial(engines.run, partition=partition, adapter=adapter)
        self._rows, self._attention = {**rows, **(_exchanged(sharing, engines.device) if sharing else {})}, attention

    def run(self, index: int, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Hidden [S, D] after block `index`."""
        inputs = {"hidden": hidden, "modulation": table, **self._rows, **self._attention.inputs}
        outputs = self._run(self._attention.graph("block"), inputs, index)
        self._attention.count(outputs)
        return outputs["hidden_out"]


class SegmentedBlocks:
    """A block is three engines; the row-local ones run over at most the profile's `row_chunk` rows at once.

    What they pass on is written where it belongs in the whole sequence, in buffers that all blocks share.
    """

    def __init__(
        self,
        engines: EngineSet,
        partition: Partition,
        rows: Mapping[str, torch.Tensor],
        attention: BlocksAttention,
        adapter: str | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._run = partial(engines.run, partition=partition, adapter=adapter)
        self._rows, self._attention, self._sharing = rows, attention, sharing
        graphs, count = engines.manifest.graphs, len(rows["modulation_index"])
        chunk = engines.manifest.profile.row_chunk or count
        self._chunks = [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]
        self._heads = {spec.name: engines.empty(_sized(spec, count)) for spec in graphs["block.project"].outputs}
        mixed, hidden = graphs["block.attend"].outputs[0], graphs["block.finish"].outputs[0]
        # What attention returns, of this rank's heads: all of the sequence's rows.
        self._mixed = engines.empty(_sized(mixed, sharing.rows if sharing else count))
        # One is read while the other is written.
        self._hidden = [engines.empty(_sized(hidden, count)) for _ in range(2)]

    def run(self, index: int, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Hidden [S, D] after block `index`."""
        for chunk in self._chunks:
            self._project(index, chunk, hidden, table)
        mixed = self._attend()
        result = self._hidden[index % 2]
        for chunk in self._chunks:
            self._finish(index, chunk, hidden, mixed[chunk], table, result)
        return result

    def _attend(self) -> torch.Tensor:
        """Mixed values [S, heads * head_dim] of the rows here, once they have attended to all of the sequence's."""
        # What came from other ranks is let go of before the next exchange, which needs as much.
        inputs = {**self._all_rows(), **self._attention.inputs}
        outputs = self._run(self._attention.graph("block.attend"), inputs, outputs={"mixed": self._mixed})
        del inputs
        self._attention.count(outputs)
        if not self._sharing:
            return self._mixed
        here = next(iter(self._heads.values()))
        local, _, head_dim = here.shape
        return self._sharing.group.to_rows(self._mixed.unflatten(1, (-1, head_dim)), local).flatten(1)

    def _all_rows(self) -> dict[str, torch.Tensor]:
        """What attention reads: all of the sequence's rows, of this rank's heads."""
        if not self._sharing:
            return self._heads
        group, rows = self._sharing.group, self._sharing.rows
        return dict(zip(self._heads, group.to_heads(list(self._heads.values()), rows), strict=True))

    def _project(self, index: int, chunk: slice, hidden: torch.Tensor, table: torch.Tensor) -> None:
        rows = {name: tensor[chunk] for name, tensor in self._rows.items()}
        inputs = {"hidden": hidden[chunk], "modulation": table, **rows}
        outputs = {name: tensor[chunk] for name, tensor in self._heads.items()}
        self._run("block.project", inputs, index, outputs=outputs)

    def _finish(
        self,
        index: int,
        chunk: slice,
        hidden: torch.Tensor,
        mixed: torch.Tensor,
        table: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        modulation = {"modulation": table, "modulation_index": self._rows["modulation_index"][chunk]}
        inputs = {"hidden": hidden[chunk], "mixed": mixed, **modulation}
        self._run("block.finish", inputs, index, outputs={"hidden_out": result[chunk]})


def _exchanged(sharing: Sharing, device: torch.device) -> dict[str, torch.Tensor]:
    """What an engine that exchanges with other ranks takes beside the rows."""
    sequence = torch.zeros(sharing.rows, dtype=torch.int64, device=device)
    return {SEQUENCE: sequence, GROUP: torch.tensor([handle_of(sharing.group)])}


def _sized(spec: TensorRecord, rows: int) -> TensorRecord:
    """The tensor with so many rows."""
    return spec.model_copy(update={"shape": tuple(rows if isinstance(size, str) else size for size in spec.shape)})
