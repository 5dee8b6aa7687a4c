"""Gives an exported graph's inputs, outputs and dynamic dimensions the names that were declared for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import onnx_ir as ir
import torch

from export.graphs.graph import Axis

_ONNX_NAMES: dict[torch.dtype, str] = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float8_e4m3fn: "FLOAT8E4M3FN",
    torch.int64: "INT64",
    torch.uint8: "UINT8",
}


class Declared(Protocol):
    """What names a tensor: a `TensorSpec` or a `WeightInput`."""

    @property
    def name(self) -> str:
        """Name in the graph."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        ...

    @property
    def shape(self) -> tuple[int | Axis, ...]:
        """Sizes; axes are dynamic."""
        ...


class DeclarationError(ValueError):
    """A traced graph's inputs or outputs are not those that were declared."""


def name_tensors(model: ir.Model, inputs: Sequence[Declared], outputs: Sequence[Declared]) -> ir.Model:
    """Names inputs, outputs and axes; other dynamic sizes that the exporter named after its own symbols are unnamed.

    Raises:
        DeclarationError: number, dtype or fixed sizes differ from the declaration.
    """
    taken = {d.name for d in (*inputs, *outputs)}
    _move_away(model, taken)
    symbols: dict[str, str] = {}
    for kind, values, declared in (("input", model.graph.inputs, inputs), ("output", model.graph.outputs, outputs)):
        if len(values) != len(declared):
            raise DeclarationError(f"{len(values)} {kind}s were traced, {len(declared)} were declared")
        for value, spec in zip(values, declared, strict=True):
            _name(value, spec, symbols)
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None and not value.is_graph_output():
                value.shape = ir.Shape([_known(d, symbols) for d in value.shape])
    return model


def _move_away(model: ir.Model, taken: set[str]) -> None:
    """Renames inner values that bear a name about to be given."""
    for node in model.graph:
        for value in node.outputs:
            if value.name in taken:
                value.name = f"{value.name}_inner"


def _name(value: ir.Value, spec: Declared, symbols: dict[str, str]) -> None:
    dtype = onnx_dtype(spec.dtype)
    shape = list(value.shape or ())
    legal = len(shape) == len(spec.shape) and all(
        isinstance(d, Axis) or n == d for n, d in zip(shape, spec.shape, strict=True)
    )
    if value.dtype != dtype or not legal:
        raise DeclarationError(
            f"{spec.name}: declared {spec.dtype} {[getattr(d, 'name', d) for d in spec.shape]}, "
            f"traced {value.dtype} {shape}"
        )
    for traced, dimension in zip(shape, spec.shape, strict=True):
        if isinstance(dimension, Axis) and isinstance(traced, ir.SymbolicDim) and traced.value is not None:
            symbols.setdefault(str(traced.value), dimension.name)
    value.name = spec.name
    value.shape = ir.Shape([d.name if isinstance(d, Axis) else d for d in spec.shape])


def onnx_dtype(dtype: torch.dtype) -> ir.DataType:
    """The ONNX element type of a torch dtype."""
    return ir.DataType[_ONNX_NAMES[dtype]]


def _known(size: int | ir.SymbolicDim, symbols: dict[str, str]) -> int | str | None:
    return size if isinstance(size, int) else symbols.get(str(size.value))
