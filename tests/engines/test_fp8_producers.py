"""FP8 linears whose rows are quantised by what makes them: which producers take it over, and at any number of rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from engines.backends.fp8_producers import quantise_in_producers
from plugins.ops import fp8_linear, gated_residual, modulated_rms_norm, quantised_rows, swiglu

WIDTH, INNER, CHANNELS = 32, 64, 48


class Layers(nn.Module):
    """A norm, a projection, a SwiGLU, a projection, a gated residual, a norm and two projections of the same rows."""

    def forward(
        self,
        x: torch.Tensor,
        table: torch.Tensor,
        index: torch.Tensor,
        wide: torch.Tensor,
        back: torch.Tensor,
        scales: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        normed = modulated_rms_norm.OP(x, table[0], table, table, index, 1e-5)
        halves = fp8_linear.OP(normed, wide, scales[: 2 * INNER])
        update = fp8_linear.OP(swiglu.OP(*halves.chunk(2, -1)), back, scales[:WIDTH])
        hidden = gated_residual.OP(x, update, table, index)
        again = modulated_rms_norm.OP(hidden, table[0], table, table, index, 1e-5)
        return hidden, fp8_linear.OP(again, wide, scales[: 2 * INNER]), fp8_linear.OP(x, wide, scales[: 2 * INNER])


@pytest.fixture(scope="module")
def changed() -> torch.export.ExportedProgram:
    """The layers traced at any number of rows, changed, and traced again as the compiler does."""
    bfloat16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    arguments = (
        torch.randn(40, WIDTH).to(bfloat16),
        torch.randn(5, WIDTH).to(bfloat16),
        torch.randint(5, (40,)),
        torch.randn(2 * INNER, WIDTH).to(e4m3),
        torch.randn(WIDTH, INNER).to(e4m3),
        torch.ones(2 * INNER),
    )
    rows = torch.export.Dim("rows", min=2, max=4096)
    shapes = ({0: rows}, None, {0: rows}, None, None, None)
    program = torch.export.export(Layers(), arguments, dynamic_shapes=shapes, strict=False)
    quantise_in_producers(program.graph)
    return program.run_decompositions({})


def test_norms_and_activations_quantise_their_rows_and_other_rows_are_quantised_by_themselves(
    changed: torch.export.ExportedProgram,
) -> None:
    called = Counter(node.target for node in changed.graph.nodes)
    assert called[quantised_rows.NORM.overload] == 1
    assert called[quantised_rows.SWIGLU.overload] == 1
    assert called[quantised_rows.ROWS.overload] == 1
    assert called[torch.ops.aten._scaled_mm.default] == 3
    # The norm after a gated residual is left to the compiler, which makes one kernel of both.
    assert called[modulated_rms_norm.OP.overload] == called[fp8_linear.OP.overload] == 1
    assert called[swiglu.OP.overload] == 0


def test_the_number_of_rows_stays_open(changed: torch.export.ExportedProgram) -> None:
    products = [n for n in changed.graph.nodes if n.target is torch.ops.aten._scaled_mm.default]
    assert all(isinstance(node.meta["val"].shape[0], torch.SymInt) for node in products)
