"""Divides the linear layers of a graph among the ranks of a group: tensor parallelism.

Layers that make heads, or inner channels of a feed-forward, are divided by their outputs, and those behind them by
their inputs. Each rank's results of the latter are parts of a sum over the ranks, which is taken in float32: inside the
graph by `h3::all_reduce`, or between graphs that end where a sum is due.

All ranks have the same graph. Its weights are the first rank's parts of stored tensors, `Stored.share`, from which
those of the others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import nn

from export.checkpoint.expressions import Stored, Weight
from export.graphs.graph import Graph, TensorSpec
from export.schemes import SchemeError


class ShardError(ValueError):
    """A graph that the ranks cannot divide; says what does not divide, and the nearest number of ranks that does."""


def check_ranks(graph: Graph, ranks: int, sizes: Mapping[str, int]) -> None:
    """Checks that the ranks divide each of some sizes, by what they are sizes of.

    Raises:
        ShardError: they do not.
    """
    legal = [n for n in range(1, min(sizes.values()) + 1) if gcd(*sizes.values()) % n == 0]
    if ranks not in legal:
        nearest = min(legal, key=lambda n: abs(n - ranks))
        listed = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise ShardError(f"graph {graph.name}: ranks = {ranks}: must divide its {listed}; nearest legal: {nearest}")


def divided(spec: TensorSpec, axis: int, ranks: int) -> TensorSpec:
    """The tensor with one rank's part of an axis of fixed size, which the ranks divide."""
    size = spec.shape[axis]
    assert isinstance(size, int)
    return replace(spec, shape=(*spec.shape[:axis], size // ranks, *spec.shape[axis + 1 :]))


def sharded(
    graph: Graph,
    module: Callable[[], nn.Module],
    ranks: int,
    groups: Mapping[str, int],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    **changes: Any,
) -> Graph:
    """The graph of one rank's `module`, whose parameters are parts of the graph's own by the same names.

    A parameter is divided along the axis on which the rank's is shorter. `groups` are the equal parts of a linear
    layer's outputs that lie one after the other and are divided each, by its name; one for those that are not named.

    Raises:
        ShardError: a weight that is to be divided is made of several tensors.
    """
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in module().named_parameters()}
    weights = tuple(
        {n: _part(graph, n, own[n], shape, ranks, groups.get(n.rpartition(".")[0], 1)) for n, shape in shapes.items()}
        for own in graph.weights
    )
    return replace(graph, module=module, inputs=inputs, outputs=outputs, weights=weights, **changes)


def divide_outputs(module: nn.Module, names: tuple[str, ...], ranks: int) -> None:
    """Has linear layers make one rank's channels."""
    for name in names:
        layer = module.get_submodule(name)
        module.set_submodule(name, _like(layer, _size(layer.in_features), _size(layer.out_features) // ranks))


def divide_inputs(module: nn.Module, names: tuple[str, ...], ranks: int) -> None:
    """Has linear layers take one rank's channels."""
    for name in names:
        layer = module.get_submodule(name)
        module.set_submodule(name, _like(layer, _size(layer.in_features) // ranks, _size(layer.out_features)))


def _like(layer: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """A linear layer of another size, quantised as the given one is."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(inputs, outputs, bias=False, dtype=layer.weight.dtype)
    try:
        made: nn.Module = type(layer)(inputs, outputs)
    except SchemeError as error:
        raise ShardError(f"one rank's part of a layer: {error}; take fewer ranks") from error
    return made


def _size(value: object) -> int:
    assert isinstance(value, int)  # linear layers and the schemes' own have both sizes
    return value


def _part(graph: Graph, name: str, weight: Weight, shape: tuple[int, ...], ranks: int, groups: int) -> Weight:
    if weight.shape == shape:
        return weight
    if not isinstance(weight, Stored):
        raise ShardError(f"graph {graph.name}: {name} is made of several stored tensors, which ranks cannot divide")
    (axis,) = (axis for axis, (whole, part) in enumerate(zip(weight.shape, shape, strict=True)) if whole != part)
    return weight.share(ranks, axis, groups)
