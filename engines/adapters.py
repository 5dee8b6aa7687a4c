"""Adapters that requests choose between: what their weights are to the engines, and what these are called.

A store offers its adapters in one of two ways, by its profile's `adapters.mode`. Both swap pointers, and neither
touches the checkpoint's own weights, so that a request without an adapter is computed as in a store that has none.
"""

from __future__ import annotations

from typing import Literal

AdapterMode = Literal["low_rank", "merged"]
"""Engines of their own with a low-rank side at each linear, which read the checkpoint's weights and an adapter's small
ones; or the checkpoint's engines, and all weights of the linears once more, with the adapter merged into them."""

ADAPTED = ("context", "block", "block.project", "block.finish")
"""The graphs that adapters change, by the names that their weights go by."""

_LOW_RANK = ".low_rank"


def low_rank_name(graph: str) -> str:
    """The name of a graph with low-rank sides."""
    return f"{graph}{_LOW_RANK}"


def without_sides(graph: str) -> str:
    """The graph that a graph is with low-rank sides; itself where it has none."""
    return graph.removesuffix(_LOW_RANK)


def has_sides(graph: str) -> bool:
    """Whether a graph takes an adapter's weights beside its own."""
    return graph.endswith(_LOW_RANK)


def weights_key(partition: str, adapter: str | None = None) -> str:
    """What a manifest calls weights of the transformer: those of a partition, or an adapter's for it."""
    return partition if adapter is None else f"{partition}+{adapter}"
