"""One transformer block of the denoiser: the graph that runs once for each layer of every step."""

from __future__ import annotations

import torch
from torch import nn

from export.checkpoint import Checkpoint
from export.graphs.attention import SelfAttention
from export.graphs.block_layout import BlockLayout, block_layout
from export.graphs.feed_forward import FeedForward
from export.graphs.graph import Graph, TensorSpec
from export.graphs.rows import ROWS
from plugins.dimensions import MODALITIES, TIMESTEP_SLOTS, DenoiserDimensions
from plugins.ops.modulated_rms_norm import OP as MODULATED_RMS_NORM


class Block(nn.Module):
    """Modulated attention and feed-forward with gated residuals (spec/model.md 2.2, step 3)."""

    def __init__(self, dimensions: DenoiserDimensions, layout: BlockLayout, compute: torch.dtype) -> None:
        super().__init__()
        # Only the norms' weights are theirs: the op that runs is the fused one.
        self.norm1 = nn.RMSNorm(dimensions.hidden, eps=dimensions.norm_eps, dtype=compute)
        self.norm2 = nn.RMSNorm(dimensions.hidden, eps=dimensions.norm_eps, dtype=compute)
        self.attention = SelfAttention(dimensions, layout.qkv, compute)
        self.feed_forward = FeedForward(dimensions.hidden, dimensions.ffn, layout.gate_first, compute)
        self.eps = dimensions.norm_eps

    def forward(
        self,
        hidden: torch.Tensor,
        modulation: torch.Tensor,
        modulation_index: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden [S, D] to hidden [S, D]; each row takes its shifts, scales and gates from its row of `modulation`."""
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)
        x = MODULATED_RMS_NORM(hidden, self.norm1.weight, scale1, shift1, modulation_index, self.eps)
        hidden = hidden + nn.functional.embedding(modulation_index, gate1) * self.attention(x, (cos, sin))
        x = MODULATED_RMS_NORM(hidden, self.norm2.weight, scale2, shift2, modulation_index, self.eps)
        return hidden + nn.functional.embedding(modulation_index, gate2) * self.feed_forward(x)


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `block` graph; instance i is layer i."""
    dimensions, layout = checkpoint.dimensions.denoiser, block_layout(checkpoint, partition)
    stored = checkpoint.stored("denoiser", partition)
    table_rows = TIMESTEP_SLOTS * MODALITIES
    angles = 3 * dimensions.rope_frequencies
    graph = Graph(
        name="block",
        module=lambda: Block(dimensions, layout, compute),
        inputs=(
            TensorSpec("hidden", compute, (ROWS, dimensions.hidden)),
            TensorSpec("modulation", compute, (table_rows, 6 * dimensions.hidden)),
            TensorSpec("modulation_index", torch.int64, (ROWS,), below=table_rows),
            TensorSpec("cos", torch.float32, (ROWS, angles)),
            TensorSpec("sin", torch.float32, (ROWS, angles)),
        ),
        outputs=(TensorSpec("hidden_out", compute, (ROWS, dimensions.hidden)),),
        weights=tuple(layout.weights(stored, f"{layout.blocks}.{i}") for i in range(dimensions.layers)),
        compute=compute,
        trials=({"rows": 1}, {"rows": 7}, {"rows": 50}),
    )
    return (graph,)
