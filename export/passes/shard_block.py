"""A block's linear layers on the ranks of a group: each has some heads, and some channels of the feed-forward.

All ranks hold all rows. For each block they add up two tensors of the size of the hidden rows in float32, which is
several times what they exchange where each has some rows of all heads instead; what they save is half of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from export.graphs.attention import AttentionOutput, Projections
from export.graphs.block import Block, Finish
from export.graphs.graph import Graph, TensorSpec
from export.graphs.group_input import group_input
from export.passes.shard_tensors import check_ranks, divide_inputs, divide_outputs, divided, sharded
from plugins.ops.all_reduce import OP as ALL_REDUCE

SEGMENTS = ("block.project", "block.attend", "block.merge", "block.feed", "block.close")
"""The graphs that a block is made of where it ends at its sums, in their order."""

PACKED = 3
"""Queries, keys and values in one projection."""

_M = TypeVar("_M", bound=nn.Module)


class Merge(nn.Module):
    """What a rank's heads add to the hidden rows."""

    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self.attention: AttentionOutput = finish.attention

    def forward(self, mixed: torch.Tensor) -> torch.Tensor:
        """Mixed values of a rank's heads [R, heads * head_dim] to its part of a sum, float32 [R, D]."""
        part: torch.Tensor = self.attention(mixed)
        return part.float()


class Feed(nn.Module):
    """The residual of attention, and what a rank's inner channels add to it."""

    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self.norm2, self.feed_forward = finish.norm2, finish.feed_forward
        self._finish = (finish,)  # in a tuple: its other layers are not this module's

    def forward(
        self, hidden: torch.Tensor, update: torch.Tensor, modulation: torch.Tensor, modulation_index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden [R, D] and attention's sum, float32 [R, D], to hidden [R, D] and a part of a sum, float32 [R, D]."""
        (finish,) = self._finish
        hidden = finish.attended(hidden, update.to(hidden.dtype), modulation, modulation_index)
        return hidden, finish.update(hidden, modulation, modulation_index).float()


class Close(nn.Module):
    """The residual of the feed-forward; has no weights."""

    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self._finish = (finish,)

    def forward(
        self, hidden: torch.Tensor, update: torch.Tensor, modulation: torch.Tensor, modulation_index: torch.Tensor
    ) -> torch.Tensor:
        """Hidden [R, D] and the feed-forward's sum, float32 [R, D], to hidden [R, D]."""
        (finish,) = self._finish
        return finish.fed(hidden, update.to(hidden.dtype), modulation, modulation_index)


class SummedBlock(nn.Module):
    """A rank's part of a block, which takes the sums over the ranks of a group itself."""

    def __init__(self, block: Block, ranks: int) -> None:
        super().__init__()
        self.project, self.attend, self.finish, self.ranks = block.project, block.attend, block.finish, ranks

    def forward(
        self,
        hidden: torch.Tensor,
        modulation: torch.Tensor,
        modulation_index: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *attending_and_group: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As `Block`, for hidden rows that all ranks hold; behind what its attention takes comes the group's handle."""
        *attending, group = attending_and_group
        attended = self.attend(*self.project(hidden, modulation, modulation_index, cos, sin), *attending)
        mixed, *skipped = attended if isinstance(attended, tuple) else (attended,)
        update = self._sum(self.finish.attention(mixed), group)
        hidden = self.finish.attended(hidden, update, modulation, modulation_index)
        update = self._sum(self.finish.update(hidden, modulation, modulation_index), group)
        result = self.finish.fed(hidden, update, modulation, modulation_index)
        return (result, skipped[0]) if skipped else result

    def _sum(self, part: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = ALL_REDUCE(part.float(), group, self.ranks)
        return total.to(part.dtype)


def shard_block(graph: Graph, heads: int, ranks: int) -> tuple[Graph, ...]:
    """A block, or one of its three segments, quantised or not, for each of `ranks` ranks.

    `block` stays one graph, which sums over the ranks itself. Of the segments, which end at the sums, `block.finish`
    becomes `block.merge`, `block.feed` and `block.close`: the first two make a rank's `part` of an update of the hidden
    rows, float32, the caller sums, and the last two take the `update`. Any other graph stays as it is.

    Raises:
        ShardError: the ranks do not divide the heads and the feed-forward's channels.
    """
    if graph.name.startswith("block"):
        with torch.device("meta"):
            check_ranks(graph, ranks, {"heads": heads} | dict(_inner(graph.module())))
    if graph.name == "block.finish":
        return _finish(graph, ranks)
    if graph.name == "block.project" or graph.name.startswith("block.attend"):
        inputs, outputs = (tuple(_narrowed(s, heads, ranks) for s in side) for side in (graph.inputs, graph.outputs))
        return (_of_rank(graph, ranks, lambda module: module, inputs, outputs),)
    if graph.name == "block":
        inputs = (*graph.inputs, group_input(ranks))
        outputs = tuple(_narrowed(spec, heads, ranks) for spec in graph.outputs)
        return (_of_rank(graph, ranks, lambda module: SummedBlock(_as(module, Block), ranks), inputs, outputs),)
    return (graph,)


def _finish(graph: Graph, ranks: int) -> tuple[Graph, ...]:
    hidden, mixed, *modulation = graph.inputs
    (result,) = graph.outputs
    part, update = (TensorSpec(name, torch.float32, hidden.shape) for name in ("part", "update"))
    merge = _of_rank(graph, ranks, lambda m: Merge(_as(m, Finish)), (divided(mixed, 1, ranks),), (part,))
    inputs = (hidden, update, *modulation)
    feed = _of_rank(graph, ranks, lambda m: Feed(_as(m, Finish)), inputs, (replace(hidden, name="attended"), part))
    close = _of_rank(graph, ranks, lambda m: Close(_as(m, Finish)), inputs, (result,))
    names = SEGMENTS[2:]
    merge, feed, close = (replace(g, name=name) for g, name in zip((merge, feed, close), names, strict=True))
    return merge, feed, replace(close, weights=({},))


def _of_rank(
    graph: Graph,
    ranks: int,
    wrap: Callable[[nn.Module], nn.Module],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
) -> Graph:
    with torch.device("meta"):
        groups = dict(_groups(graph.module()))
    return sharded(graph, lambda: wrap(_local(graph.module(), ranks)), ranks, groups, inputs, outputs)


def _local(module: nn.Module, ranks: int) -> nn.Module:
    """One rank's module."""
    linears = [name for name, layer in module.named_modules() if hasattr(layer, "in_features")]
    inward = [name for name in linears if name.endswith(("attention.out", "feed_forward.down"))]
    for layer in [layer for layer in module.modules() if isinstance(layer, Projections)]:
        layer.heads //= ranks
    divide_inputs(module, tuple(inward), ranks)
    divide_outputs(module, tuple(name for name in linears if name not in inward), ranks)
    return module


def _groups(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Layers whose outputs are several stacked matrices', each of which the ranks divide."""
    for name, layer in module.named_modules():
        if isinstance(layer, Projections) and layer.layout == "stacked":
            yield f"{name}.qkv", PACKED
        if name.endswith("feed_forward"):
            yield f"{name}.gate_and_up", 2


def _inner(module: nn.Module) -> Iterator[tuple[str, int]]:
    """The feed-forward's channels."""
    for name, layer in module.named_modules():
        if name.endswith("feed_forward.down"):
            yield "feed-forward channels", int(str(layer.in_features))


def _narrowed(spec: TensorSpec, heads: int, ranks: int) -> TensorSpec:
    """With a share of the heads: of [rows, heads, head_dim], of their mixed values [rows, inner], or of [heads]."""
    if (len(spec.shape) == 3 and spec.shape[1] == heads) or spec.name == "mixed":
        return divided(spec, 1, ranks)
    return divided(spec, 0, ranks) if spec.shape == (heads,) else spec


def _as(module: nn.Module, kind: type[_M]) -> _M:
    assert isinstance(module, kind)  # as the graph of that name is declared
    return module
