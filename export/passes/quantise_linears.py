"""Quantises a graph's linear layers: the same graph over the tensors of a sidecar file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import sqrt

from torch import nn

from export.checkpoint.expressions import Weight
from export.graphs.graph import Graph
from export.linears import LinearsError, quantised_linears
from export.sidecar import Sidecar

_PEAK = 4.0
"""Largest activation of a row over the row's root mean square; of normally distributed ones, 1 in 16,000 is larger."""


def quantise_linears(graph: Graph, sidecar: Sidecar) -> Graph:
    """The graph with its listed linear layers quantised; every other weight is the same object as before.

    A graph that has none of them is returned as it is. Packed projections stay packed: their channels have a scale
    each, so that their order does not matter.

    Raises:
        LinearsError: the graph's linear layers are not those that are listed, or one of them has a bias.
    """
    names = quantised_linears(graph)
    if not names:
        return graph
    return replace(
        graph,
        module=partial(_build, graph, names, sidecar),
        weights=tuple(_bind(instance, names, sidecar) for instance in graph.weights),
        tolerance=max(graph.tolerance, _tolerance(graph, names, sidecar)),
    )


def _build(graph: Graph, names: tuple[str, ...], sidecar: Sidecar) -> nn.Module:
    module = graph.module()
    for name in names:
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear)  # as quantised_linears found it
        if linear.bias is not None:
            raise LinearsError(f"graph {graph.name}: linear layer {name} has a bias; only layers without are quantised")
        module.set_submodule(name, sidecar.scheme.linear(linear.in_features, linear.out_features))
    return module


def _bind(instance: Mapping[str, Weight], names: tuple[str, ...], sidecar: Sidecar) -> dict[str, Weight]:
    replaced = {f"{name}.weight" for name in names}
    kept = {name: weight for name, weight in instance.items() if name not in replaced}
    return kept | dict(_quantised(instance, names, sidecar))


def _quantised(
    instance: Mapping[str, Weight], names: tuple[str, ...], sidecar: Sidecar
) -> Iterator[tuple[str, Weight]]:
    for name in names:
        for parameter, stored in sidecar.weights[instance[f"{name}.weight"]].items():
            yield f"{name}.{parameter}", stored


def _tolerance(graph: Graph, names: tuple[str, ...], sidecar: Sidecar) -> float:
    """The tolerance of a comparison whose sides may round an activation to different sides.

    Their activations agree to float32's precision, so one in about 10^5 that lies that near the middle of two values
    falls to one side here and to the other there. It then differs by the distance of the two values: at most
    `largest_flip` times its row's largest, that is times `_PEAK / sqrt(K)` the row's length; and a row of the result
    differs by the same share of its own length, as a random matrix stretches both alike.
    """
    inner = min(graph.weights[0][f"{name}.weight"].shape[1] for name in names)
    return sidecar.scheme.largest_flip * _PEAK / sqrt(inner)
