"""What a block's attention takes beside the rows reaches the engine that attends, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.store import TensorRecord
from runtime.block import SEGMENTS, WHOLE, open_blocks

ROWS, WIDTH, CHUNK = 5, 4, 2


class Recorder:
    """Engines that say which inputs they were given."""

    def __init__(self, graphs: tuple[str, ...]) -> None:
        self.calls: list[tuple[str, dict[str, torch.Tensor]]] = []
        self.manifest: Any = SimpleNamespace(
            graphs={name: SimpleNamespace(outputs=_outputs(name)) for name in graphs},
            profile=SimpleNamespace(row_chunk=CHUNK),
        )

    def empty(self, spec: TensorRecord) -> torch.Tensor:
        return torch.zeros(*(int(size) for size in spec.shape))

    def run(self, graph: str, inputs: dict[str, torch.Tensor], *rest: object) -> dict[str, torch.Tensor]:
        self.calls.append((graph, {name: tensor.clone() for name, tensor in inputs.items()}))
        return {"hidden_out": inputs.get("hidden", torch.zeros(0))}


def _outputs(graph: str) -> tuple[TensorRecord, ...]:
    names = {"block.project": ("query", "key", "value"), "block.attend": ("mixed",)}.get(graph, ("hidden_out",))
    return tuple(TensorRecord(name=name, dtype="float32", shape=("rows", WIDTH)) for name in names)


@pytest.mark.parametrize("graphs", [WHOLE, SEGMENTS], ids=["whole", "segments"])
def test_threshold_of_the_step_is_given_to_what_attends_alone(graphs: tuple[str, ...]) -> None:
    engines, threshold = Recorder(graphs), torch.zeros(1)
    rows = {"modulation_index": torch.zeros(ROWS, dtype=torch.int64), "cos": torch.zeros(ROWS, 3)}
    blocks = open_blocks(engines, "fl2va", rows, {"skip_threshold": threshold})  # type: ignore[arg-type]
    for value in (0.0, 0.25):
        threshold.fill_(value)
        blocks.run(0, torch.zeros(ROWS, WIDTH), torch.zeros(1))
    given = [(graph, inputs["skip_threshold"].item()) for graph, inputs in engines.calls if "skip_threshold" in inputs]
    attends = "block" if graphs == WHOLE else "block.attend"
    assert given == [(attends, 0.0), (attends, 0.25)]
