"""The graph of any rank, of one whose weights are the first rank's."""

from __future__ import annotations

from dataclasses import replace

from export.checkpoint.expressions import Stored, Weight
from export.graphs.graph import Graph


def of_rank(graph: Graph, rank: int) -> Graph:
    """The graph with the weights of a rank."""

    def moved(weight: Weight) -> Weight:
        assert isinstance(weight, Stored)
        return replace(weight, offset=weight.offset + rank * weight.cut.run) if weight.cut else weight

    return replace(graph, weights=tuple({n: moved(w) for n, w in own.items()} for own in graph.weights))
