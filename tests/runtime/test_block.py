"""Each forward's attention: its engine runs, its threshold reaches that one alone, what is skipped is counted."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.store import TensorRecord
from plugins.ranks import Loopback
from runtime.attention import BlocksAttention
from runtime.block import SEGMENTS, WHOLE, Sharing, open_blocks
from runtime.quality import Attending

ROWS, HEADS, WIDTH, CHUNK = 5, 2, 4, 2


class Recorder:
    """Engines that say which inputs they were given; those that skip leave out 3 tiles in each of 2 heads."""

    device = torch.device("cpu")

    def __init__(self, graphs: tuple[str, ...], further: tuple[str, ...]) -> None:
        self.calls: list[tuple[str, dict[str, torch.Tensor]]] = []
        self.manifest: Any = SimpleNamespace(
            graphs={name: SimpleNamespace(outputs=_outputs(name)) for name in graphs},
            profile=SimpleNamespace(row_chunk=CHUNK),
            attention="dense",
            further_attention=further,
        )

    def empty(self, spec: TensorRecord) -> torch.Tensor:
        return torch.zeros(*(int(size) for size in spec.shape))

    def run(
        self, graph: str, inputs: dict[str, torch.Tensor], *rest: object, **named: object
    ) -> dict[str, torch.Tensor]:
        self.calls.append((graph, {name: tensor.clone() for name, tensor in inputs.items()}))
        counted = {"skipped_tiles": torch.tensor([3, 3])} if graph.endswith("skip") else {}
        return {"hidden_out": inputs.get("hidden", torch.zeros(0)), **counted}


def _outputs(graph: str) -> tuple[TensorRecord, ...]:
    names = {"block.project": ("query", "key", "value"), "block.attend": ("mixed",)}.get(graph, ("hidden_out",))
    shape = ("rows", HEADS, WIDTH) if "query" in names else ("rows", WIDTH)
    return tuple(TensorRecord(name=name, dtype="float32", shape=shape) for name in names)


@pytest.mark.parametrize("graphs", [WHOLE, SEGMENTS], ids=["whole", "segments"])
def test_every_forward_has_its_own_attention(graphs: tuple[str, ...]) -> None:
    engines: Any = Recorder(graphs, ("skip", "sage+skip"))
    attention = BlocksAttention(engines)
    rows = {"modulation_index": torch.zeros(ROWS, dtype=torch.int64), "cos": torch.zeros(ROWS, 3)}
    blocks = open_blocks(engines, "fl2va", rows, attention)
    forwards = (("dense", 0.0), ("skip", 0.25), ("sage", 0.0), ("sage+skip", 0.5))
    for kind, threshold in forwards:
        attention.use(Attending(forwards=1, attention=kind, skip_threshold=threshold))  # type: ignore[arg-type]
        blocks.run(0, torch.zeros(ROWS, WIDTH), torch.zeros(1))
    given = [(graph, inputs["skip_threshold"].item()) for graph, inputs in engines.calls if "skip_threshold" in inputs]
    attends = "block" if graphs == WHOLE else "block.attend"
    # SAGE runs on the engine that can skip, with nothing to skip.
    assert given == [(f"{attends}.skip", 0.25), (f"{attends}.sage+skip", 0.0), (f"{attends}.sage+skip", 0.5)]
    assert [graph for graph, _ in engines.calls].count(attends) == 1
    assert attention.skipped() == 3 * 6


def test_a_profile_whose_blocks_skip_is_dense_with_the_same_engine() -> None:
    engines: Any = Recorder(WHOLE, ())
    engines.manifest.attention = "skip"
    attention = BlocksAttention(engines)
    attention.use(Attending(forwards=1, attention="dense", skip_threshold=0.0))
    assert attention.graph("block") == "block"
    assert attention.inputs["skip_threshold"].item() == 0


class Watching(Loopback):
    """A group that sees whether what it has brought for attention is still held when attention's result goes back."""

    def __init__(self) -> None:
        super().__init__(HEADS)
        self.held: list[bool] = []

    def to_heads(self, parts: Sequence[torch.Tensor], rows: int) -> tuple[torch.Tensor, ...]:
        found = super().to_heads(parts, rows)
        self._brought = [weakref.ref(part) for part in found]
        return found

    def to_rows(self, part: torch.Tensor, local_rows: int) -> torch.Tensor:
        self.held += [brought() is not None for brought in self._brought]
        return super().to_rows(part, local_rows)


def test_what_came_from_other_ranks_is_let_go_of_before_the_next_exchange() -> None:
    engines: Any = Recorder(SEGMENTS, ())
    rows = {"modulation_index": torch.zeros(ROWS, dtype=torch.int64), "cos": torch.zeros(ROWS, 3)}
    group = Watching()
    sharing = Sharing(group, HEADS * ROWS)
    blocks = open_blocks(engines, "fl2va", rows, BlocksAttention(engines), sharing=sharing)
    blocks.run(0, torch.zeros(ROWS, WIDTH), torch.zeros(1))
    assert group.held == [False] * 3
