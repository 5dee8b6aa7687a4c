"""Puts another attention in the denoiser's blocks; the refiner's two are another graph, and stay dense always."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from export.graphs.block import Attend, AttendResult, Block
from export.graphs.graph import Graph, TensorSpec
from plugins.block_attention import (
    ATTENDING,
    SKIP_THRESHOLD,
    SKIPPED_TILES,
    VIDEO_SPARSE,
    BlockAttention,
    quantises,
    skips,
)
from plugins.kernels.hopper_attention import BFLOAT16, QUERY_TILE, SAGE
from plugins.ops.sage_attention import OP as SAGE_ATTENTION
from plugins.ops.skip_softmax_attention import OP as SKIP_SOFTMAX_ATTENTION

SAGE_TOLERANCE = 2.0**-6
"""Largest difference of a SAGE block between ONNX Runtime and torch: where their float32 sums fall to different sides
of a middle between two E4M3 values, these are 2^-3 apart; and no weight is above an eighth of its row's in a trial."""

SAGE_TRIAL = SAGE.keys + 76
"""Rows of a trial that is quantised: more than a block of keys, and not a multiple of it."""


def choose_attention(graph: Graph, attention: BlockAttention, heads: int) -> Graph:
    """The graph with that attention, if it is one of a block that has attention; else as it is.

    With "skip" it has one input more, `skip_threshold`, which the sampler sets for each step, and one output more,
    `skipped_tiles`. Its weights are the same objects. Blocks that attend to video tiles have been made so.
    """
    if attention in ("dense", VIDEO_SPARSE) or graph.name not in ATTENDING:
        return graph
    threshold = (TensorSpec(SKIP_THRESHOLD, torch.float32, (1,)),) if skips(attention) else ()
    counts = (TensorSpec(SKIPPED_TILES, torch.int64, (heads,)),) if skips(attention) else ()
    tolerance = SAGE_TOLERANCE if quantises(attention) else graph.tolerance
    trials = (*graph.trials, {"rows": SAGE_TRIAL}) if quantises(attention) else graph.trials
    return replace(
        graph,
        module=partial(_build, graph, attention),
        inputs=(*graph.inputs, *threshold),
        outputs=(*graph.outputs, *counts),
        tolerance=tolerance,
        trials=trials,
        variant=attention,
    )


class SageAttend(Attend):
    """SAGE attention over the whole sequence, in the blocks and tiles of the kernel for Hopper."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, skip_threshold: torch.Tensor | None = None
    ) -> AttendResult:
        """Three of [S, heads, head_dim] to mixed values [S, heads * head_dim]; all tiles without a threshold.

        With one, it returns the number of tiles left out as well, int64 [heads].
        """
        scale, sizes = query.shape[-1] ** -0.5, (1, SAGE.keys, QUERY_TILE, SAGE.keys)
        heads = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        threshold = query.new_zeros(1, dtype=torch.float32) if skip_threshold is None else skip_threshold
        result, skipped = SAGE_ATTENTION(*heads, _rows(query), threshold, scale, *sizes)
        return _rows_first(result) if skip_threshold is None else (_rows_first(result), skipped.squeeze(0))


class SkippingAttend(Attend):
    """Attention over the whole sequence without the tiles that weigh less than a threshold."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, skip_threshold: torch.Tensor | None = None
    ) -> AttendResult:
        """Three of [S, heads, head_dim] to mixed values [S, heads * head_dim], and the number of tiles left out.

        The number is int64 [heads]; the threshold is needed.
        """
        assert skip_threshold is not None
        heads = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        scale = query.shape[-1] ** -0.5
        tiles = QUERY_TILE, BFLOAT16.keys
        result, skipped = SKIP_SOFTMAX_ATTENTION(*heads, _rows(query), skip_threshold, scale, *tiles)
        return _rows_first(result), skipped.squeeze(0)


def _build(graph: Graph, attention: BlockAttention) -> nn.Module:
    attend = SageAttend() if quantises(attention) else SkippingAttend()
    module = graph.module()
    if not isinstance(module, Block):
        return attend
    module.attend = attend
    return module


def _rows(query: torch.Tensor) -> torch.Tensor:
    """The number of rows as a tensor, which is how the ops take it: all of the sequence is valid."""
    return torch.ones_like(query[:, 0, 0], dtype=torch.int64).sum(0, keepdim=True)


def _rows_first(result: torch.Tensor) -> torch.Tensor:
    return result.squeeze(0).transpose(0, 1).flatten(1)
