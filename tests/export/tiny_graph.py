"""Graphs of one small module, for the rules that every graph must keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.safetensors_file import read_header
from export.graphs.graph import Axis, Graph, TensorSpec

ROWS = Axis("rows", 1, 64)


def store(tensors: dict[str, torch.Tensor], file: Path) -> dict[str, Stored]:
    """Saves tensors and gives them as they lie in the file."""
    save_file(tensors, file)
    return dict(read_header(file).tensors)


def graph_of(
    module: Callable[[], torch.nn.Module],
    *weights: dict[str, Weight],
    rows: Axis = ROWS,
    width: int = 4,
    out: int | None = None,
    **more: object,
) -> Graph:
    """[rows, width] float32 to [rows, out] float32."""
    return Graph(
        name="tiny",
        module=module,
        inputs=(TensorSpec("x", torch.float32, (rows, width)),),
        outputs=(TensorSpec("y", torch.float32, (rows, width if out is None else out)),),
        weights=weights,
        trials=({rows.name: 2 * rows.multiple}, {rows.name: 5 * rows.multiple}),
        **more,  # type: ignore[arg-type]
    )
