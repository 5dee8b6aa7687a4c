"""Shares the heads of a segmented block's attention between ranks; its other segments take whatever rows a rank has.

Ranks of a sequence-parallel group hold runs of rows. Between `block.project`, which makes all heads of some rows, and
`block.attend`, which reads all rows of some heads, they exchange; and so before `block.finish`.
"""

from __future__ import annotations

from dataclasses import replace

from export.graphs.graph import Graph
from export.passes.shard_tensors import check_ranks, divided

ATTEND = "block.attend"


def share_heads(graph: Graph, heads: int, ranks: int) -> Graph:
    """The graph of one of so many ranks: that of `block.attend` has its share of `heads`, any other is as it is.

    Raises:
        ShardError: the ranks do not divide the heads.
    """
    if graph.name != ATTEND or ranks == 1:
        return graph
    check_ranks(graph, ranks, {"attention heads": heads})
    # Heads [S, heads, head_dim], and their mixed values [S, inner].
    return replace(
        graph,
        inputs=tuple(divided(spec, 1, ranks) if len(spec.shape) == 3 else spec for spec in graph.inputs),
        outputs=tuple(divided(spec, 1, ranks) for spec in graph.outputs),
    )
