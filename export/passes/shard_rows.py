"""Gives each rank of a group a run of the packed rows: the denoiser's graphs as each of the ranks runs them.

Every rank runs the same graphs, over its own rows, which are an axis of their own. Attention alone wants all of them,
of some heads: the block exchanges its rows for heads before it, and heads for rows behind it, by
`h3::ulysses_all_to_all`. For blocks that are cut into segments, between which ranks exchange, see `share_heads`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from export.graphs.block import Attend, AttendResult, Block, TileAttend
from export.graphs.graph import Graph, TensorSpec
from export.graphs.group_input import group_input
from export.graphs.rows import LOCAL_ROWS, ROWS
from export.passes.shard_tensors import check_ranks, divided
from plugins.block_attention import ROW_TILES, SKIPPED_TILES
from plugins.exchanges import SEQUENCE
from plugins.ops.ulysses_all_to_all import GATED_HEADS, HEADS, PARTS
from plugins.ops.ulysses_all_to_all import ROWS as BACK


def shard_rows(graph: Graph, ranks: int, heads: int) -> Graph:
    """The graph as each of `ranks` ranks runs it, if it is one over packed rows; else as it is.

    A whole block has two inputs more: `sequence` [rows], whose size alone is read, and `group` [1], the handle of the
    ranks' group (`plugins.ranks.handle_of`). Its weights are the same objects.

    Raises:
        ShardError: the ranks do not divide the heads.
    """
    shard = _SHARDED.get(graph.name)
    if ranks == 1 or shard is None:
        return graph
    check_ranks(graph, ranks, {"attention heads": heads})
    return shard(graph, ranks)


class ShardedAttend(Attend):
    """Attention of a rank's heads over the whole sequence, between the exchanges."""

    def __init__(self, attend: nn.Module, parts: int, ranks: int) -> None:
        super().__init__()
        self.attend = attend
        self.parts, self.ranks = parts, ranks

    def forward(self, *inputs: torch.Tensor) -> AttendResult:
        """Query, key, value and, where there is one, gate, each [n, heads, head_dim], to mixed [n, heads * head_dim].

        Behind them come what the attention takes besides, the sequence [S] and the group's handle [1].
        """
        local, (*attending, sequence, group) = inputs[: self.parts], inputs[self.parts :]
        exchange = HEADS if self.parts == len(PARTS) else GATED_HEADS
        attended = self.attend(*exchange(*local, sequence, group, self.ranks), *attending)
        mixed, *skipped = attended if isinstance(attended, tuple) else (attended,)
        mine = BACK(mixed.unflatten(1, (-1, local[0].shape[2])), local[0], group, self.ranks).flatten(1)
        return (mine, skipped[0]) if skipped else mine


def _rows(graph: Graph, ranks: int) -> Graph:
    """Over a rank's rows: work row by row, which needs no other rank."""
    trials = tuple({_LOCAL.get(name, name): size for name, size in trial.items()} for trial in graph.trials)
    return replace(graph, inputs=_over_local(graph.inputs), outputs=_over_local(graph.outputs), trials=trials)


def _block(graph: Graph, ranks: int) -> Graph:
    # What tiles say is about the whole sequence.
    whole = [spec for spec in graph.inputs if spec.name == ROW_TILES]
    inputs = (spec if spec in whole else _over_local([spec])[0] for spec in graph.inputs)
    sequence = TensorSpec(SEQUENCE, torch.int64, (ROWS,), below=1)
    return replace(
        graph,
        module=partial(_build, graph, ranks),
        inputs=(*inputs, sequence, group_input(ranks)),
        outputs=_over_local([_count(spec, ranks) for spec in graph.outputs]),
        trials=tuple({**trial, LOCAL_ROWS.name: -(-trial[ROWS.name] // ranks)} for trial in graph.trials),
        variant=f"{graph.variant or 'dense'} of {ranks} ranks",
    )


_LOCAL = {ROWS.name: LOCAL_ROWS.name}

_SHARDED: dict[str, Callable[[Graph, int], Graph]] = {
    "prologue": _rows,
    "epilogue": _rows,
    "block": _block,
}


def _build(graph: Graph, ranks: int) -> nn.Module:
    module = graph.module()
    assert isinstance(module, Block)
    parts = len(PARTS) + isinstance(module.attend, TileAttend)
    module.attend = ShardedAttend(module.attend, parts, ranks)
    return module


def _over_local(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The tensors with a rank's rows in place of all."""
    return tuple(
        replace(spec, shape=tuple(LOCAL_ROWS if size is ROWS else size for size in spec.shape)) for spec in specs
    )


def _count(spec: TensorSpec, ranks: int) -> TensorSpec:
    """What is counted is counted of a rank's heads."""
    return divided(spec, 0, ranks) if spec.name == SKIPPED_TILES else spec
