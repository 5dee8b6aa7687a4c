"""A block in segments, its row-local ones over chunks, is the whole block."""

from __future__ import annotations

import pytest
import torch
from denoiser_checkpoint import DenoiserCheckpoint, denoiser_graphs
from test_composition import relative, run

from export.graphs.block import TABLE_ROWS
from export.graphs.graph import Graph

ROWS, LAYER = 23, 1


def inputs(block: Graph) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(TABLE_ROWS, (ROWS,), generator=generator)
    shapes = {s.name: [d if isinstance(d, int) else ROWS for d in s.shape] for s in block.inputs}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return drawn | {"modulation_index": index}


def in_segments(graphs: dict[str, Graph], x: dict[str, torch.Tensor], chunk: int) -> torch.Tensor:
    table, rows = x["modulation"], [slice(i, i + chunk) for i in range(0, ROWS, chunk)]
    by_row = ("modulation_index", "cos", "sin")
    projected = [
        run(graphs["block.project"], LAYER, x["hidden"][r], table, *(x[name][r] for name in by_row)) for r in rows
    ]
    mixed = run(graphs["block.attend"], 0, *(torch.cat(parts) for parts in zip(*projected, strict=True)))
    finish = graphs["block.finish"]
    return torch.cat([run(finish, LAYER, x["hidden"][r], mixed[r], table, x["modulation_index"][r]) for r in rows])


@pytest.mark.parametrize("layout", ["native", "native-stacked", "diffusers"])
@pytest.mark.parametrize("chunk", [1, 8, ROWS])
def test_a_block_in_segments_is_the_whole_block(
    denoisers: dict[str, DenoiserCheckpoint], layout: str, chunk: int
) -> None:
    graphs = denoiser_graphs(denoisers[layout], torch.float32)
    x = inputs(graphs["block"])
    whole = run(graphs["block"], LAYER, *x.values())
    # The same sums; a matrix product of other heights may take another kernel, which adds in another order.
    assert relative(in_segments(graphs, x, chunk), whole) < 2e-6


def test_segments_take_the_angles_and_the_table_of_their_own_rows(denoisers: dict[str, DenoiserCheckpoint]) -> None:
    graphs = denoiser_graphs(denoisers["native"], torch.float32)
    x = inputs(graphs["block"])
    expected = in_segments(graphs, x, 8)
    for name in ("modulation_index", "cos", "sin"):
        assert relative(in_segments(graphs, x | {name: x[name].roll(1, 0)}, 8), expected) > 1e-3
