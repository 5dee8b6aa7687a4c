"""Which stored tensors a graph's weight inputs are: their names, shapes, and what each instance binds to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

import torch

from export.checkpoint.expressions import Stored, Weight
from export.graphs.graph import Axis, Graph


@dataclass(frozen=True)
class WeightInput:
    """One weight input: its name, its dtype in the checkpoint, and its shape (an axis where instances differ)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | Axis, ...]


@dataclass(frozen=True)
class Binding:
    """A graph's weight inputs in order, and for each instance the stored tensor of every one of them by name."""

    inputs: tuple[WeightInput, ...]
    instances: tuple[Mapping[str, Stored], ...]


class BindingError(ValueError):
    """The graph's weights do not fit its module, or its instances do not fit one another."""


def bind(graph: Graph) -> Binding:
    """Names the stored tensors behind the graph's weights.

    A tensor's name is its key in the file, less the part in which the instances differ; a tensor that several
    parameters are cut from is one input.

    Raises:
        BindingError: instances disagree on parameters, structure, shapes or dtypes, or two tensors get one name.
    """
    columns = _columns(graph)
    names = [_common_suffix([stored.key for stored in column]) for column in columns]
    doubled = {n for n in names if names.count(n) > 1}
    if doubled:
        raise BindingError(f"graph {graph.name}: weight names {sorted(doubled)} stand for more than one tensor")
    declared = _declared_shapes(graph)
    inputs = [
        _weight_input(graph, name, column, declared.get(column[0].key))
        for name, column in zip(names, columns, strict=True)
    ]
    # Counted by the graph's weights, not by the columns: a graph without weights has instances too.
    instances = (dict(zip(names, (c[i] for c in columns), strict=True)) for i in range(len(graph.weights)))
    return Binding(tuple(inputs), tuple(instances))


def _columns(graph: Graph) -> list[tuple[Stored, ...]]:
    """For each distinct stored tensor of instance 0, what every instance has in its place."""
    first = graph.weights[0]
    columns: dict[str, tuple[Stored, ...]] = {}
    for parameter in first:
        for column in _parameter_columns(graph, parameter):
            key = column[0].key
            if columns.setdefault(key, column) != column:
                raise BindingError(f"graph {graph.name}: instances share {key} in different ways at {parameter}")
    return list(columns.values())


def _parameter_columns(graph: Graph, parameter: str) -> list[tuple[Stored, ...]]:
    for index, weights in enumerate(graph.weights):
        if weights.keys() != graph.weights[0].keys():
            odd = sorted(weights.keys() ^ graph.weights[0].keys())
            raise BindingError(f"graph {graph.name}: instance {index} has other parameters than instance 0: {odd}")
    leaves = [tuple(weights[parameter].leaves()) for weights in graph.weights]
    if len({len(x) for x in leaves}) > 1:
        raise BindingError(f"graph {graph.name}: {parameter} is made of {[len(x) for x in leaves]} stored tensors")
    return list(zip(*leaves, strict=True))


def _common_suffix(keys: list[str]) -> str:
    parts = zip(*(reversed(key.split(".")) for key in keys), strict=False)
    return ".".join(reversed([p[0] for p in takewhile(lambda p: len(set(p)) == 1, parts)]))


def _declared_shapes(graph: Graph) -> dict[str, tuple[int | Axis, ...]]:
    """Shapes with axes by stored key of instance 0."""
    return {_stored(graph, graph.weights[0][name]).key: shape for name, shape in graph.weight_axes.items()}


def _stored(graph: Graph, weight: Weight) -> Stored:
    if not isinstance(weight, Stored):
        raise BindingError(f"graph {graph.name}: a weight with a named axis must be a stored tensor, not {weight}")
    return weight


def _weight_input(
    graph: Graph, name: str, column: tuple[Stored, ...], declared: tuple[int | Axis, ...] | None
) -> WeightInput:
    shape = declared or column[0].shape
    for index, stored in enumerate(column):
        legal = len(shape) == len(stored.shape) and all(_fits(d, n) for d, n in zip(shape, stored.shape, strict=True))
        if not legal or stored.dtype != column[0].dtype:
            raise BindingError(
                f"graph {graph.name}, instance {index}: {stored.file} {stored.key}: expected {column[0].dtype} "
                f"{list(shape)}, found {stored.dtype} {list(stored.shape)}"
            )
    return WeightInput(name, column[0].dtype, tuple(shape))


def _fits(dimension: int | Axis, size: int) -> bool:
    return dimension.minimum <= size <= dimension.maximum if isinstance(dimension, Axis) else dimension == size
