"""Text rows of the packed sequence: projected and refined once a request, as no timestep touches them."""

from __future__ import annotations

import torch
from torch import nn

from export.checkpoint import Checkpoint
from export.graphs.attention import SelfAttention
from export.graphs.block_layout import BlockLayout, block_layout
from export.graphs.feed_forward import FeedForward
from export.graphs.graph import Graph, TensorSpec
from export.graphs.rows import TEXT_ROWS
from plugins.dimensions import DenoiserDimensions


class RefinerBlock(nn.Module):
    """A transformer block over text rows alone: no rotation, no modulation."""

    def __init__(self, dimensions: DenoiserDimensions, layout: BlockLayout, compute: torch.dtype) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dimensions.hidden, eps=dimensions.norm_eps, dtype=compute)
        self.norm2 = nn.RMSNorm(dimensions.hidden, eps=dimensions.norm_eps, dtype=compute)
        self.attention = SelfAttention(dimensions, layout.qkv, compute)
        self.feed_forward = FeedForward(dimensions.hidden, dimensions.ffn, layout.gate_first, compute)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [L, D] to rows [L, D]."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Context(nn.Module):
    """The text projection, the refiner blocks and their final norm (spec/model.md 2.2, step 1)."""

    def __init__(self, dimensions: DenoiserDimensions, layout: BlockLayout, compute: torch.dtype) -> None:
        super().__init__()
        self.context_embedder = nn.Linear(dimensions.text_dim, dimensions.hidden, dtype=compute)
        self.blocks = nn.ModuleList(RefinerBlock(dimensions, layout, compute) for _ in range(dimensions.refiner_layers))
        self.final_norm = nn.RMSNorm(dimensions.hidden, eps=dimensions.final_norm_eps, dtype=compute)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Text encoder states [L, text] to text rows [L, D]."""
        x = self.context_embedder(text)
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `context` graph."""
    dimensions, layout = checkpoint.dimensions.denoiser, block_layout(checkpoint, partition)
    parameters, stored = checkpoint.parameters("denoiser", partition), checkpoint.stored("denoiser", partition)
    weights = {name: parameters[name] for name in ("context_embedder.weight", "context_embedder.bias")}
    for i in range(dimensions.refiner_layers):
        block = layout.weights(stored, f"{layout.refiner_blocks}.{i}")
        weights |= {f"blocks.{i}.{name}": tensor for name, tensor in block.items()}
    weights["final_norm.weight"] = parameters["token_refiner.final_norm.weight"]
    graph = Graph(
        name="context",
        module=lambda: Context(dimensions, layout, compute),
        inputs=(TensorSpec("text", compute, (TEXT_ROWS, dimensions.text_dim)),),
        outputs=(TensorSpec("text_rows", compute, (TEXT_ROWS, dimensions.hidden)),),
        weights=(weights,),
        compute=compute,
        trials=({"text_rows": 1}, {"text_rows": 3}, {"text_rows": 24}),
    )
    return (graph,)
