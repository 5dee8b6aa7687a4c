"""What each rank does in the tests of divided linear layers; imported where nothing of the exporter is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engines.sessions.engine_set import EngineSet
from engines.store import EngineStore
from plugins.ranks import Group, ProcessGroup
from runtime.encoder import EMBEDDING, TextEncoder
from runtime.encoder import LAYER as LAYERS
from runtime.events import Cancellation, Reporter, Units

TOKENS = torch.arange(3, 40) * 11
LAYER = 1


def everyone() -> ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return ProcessGroup(group)


def encode(engines: EngineSet, group: Group | None) -> torch.Tensor:
    """The conditioning of TOKENS."""
    encoder = TextEncoder(engines, group)
    return encoder.encode(TOKENS, (), Units("encode", encoder.layers, Reporter.silent(), Cancellation()))


def encode_on_rank(rank: int, size: int, store: Path) -> dict[str, torch.Tensor]:
    """The same on one of the ranks that divide a store's tensors, and the bytes that it is bound to."""
    opened = EngineStore.open(store).of_rank(rank)
    text = encode(EngineSet.open(opened), everyone())
    graphs = [name for name in opened.manifest.graphs if name.startswith("text_encoder")]
    return {"text": text, "bytes": torch.tensor(opened.manifest.bound_bytes(graphs))}


class WithoutTable(EngineSet):
    """A store's layers, under given rows in place of the token table's."""

    def __init__(self, store: EngineStore, rank: int, rows: torch.Tensor) -> None:
        super().__init__(store.of_rank(rank), [LAYERS], ["fl2va"])
        self._columns = rows.chunk(store.manifest.profile.ranks.text_encoder, dim=1)[rank]

    def run(self, graph: str, *arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        if graph == EMBEDDING:
            return {"hidden": self._columns}
        return super().run(graph, *arguments, **options)


def compiled_on_rank(rank: int, size: int, store: Path, rows: Path) -> dict[str, torch.Tensor]:
    """The conditioning of the rows of some tokens, by engines that sum over the ranks themselves."""
    return {"text": encode(WithoutTable(EngineStore.open(store), rank, load_file(rows)["rows"]), everyone())}


def block_on_rank(rank: int, size: int, store: Path, inputs: Path) -> dict[str, torch.Tensor]:
    """One block in segments, on one of the ranks that divide it."""
    engines, group = EngineSet.open(EngineStore.open(store).of_rank(rank)), everyone()
    x = load_file(inputs)
    heads = engines.run("block.project", x, LAYER)
    mixed = engines.run("block.attend", heads)
    update = group.sum(engines.run("block.merge", mixed, LAYER)["part"])
    modulation = {name: x[name] for name in ("modulation", "modulation_index")}
    fed = engines.run("block.feed", {"hidden": x["hidden"], "update": update, **modulation}, LAYER)
    closed = {"hidden": fed["attended"], "update": group.sum(fed["part"]), **modulation}
    return engines.run("block.close", closed)
