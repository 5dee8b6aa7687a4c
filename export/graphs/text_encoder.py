"""The text encoder, Qwen3-VL's language model as H3 uses it: token embeddings, and one decoder layer run 50 times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from export.checkpoint.expressions import Weight
from export.graphs.graph import Graph, TensorSpec
from export.graphs.rows import TEXT_ROWS
from plugins.dimensions import TextEncoderDimensions

if TYPE_CHECKING:
    from export.checkpoint import Checkpoint

EMBEDDING, LAYER = "text_encoder.embedding", "text_encoder.layer"

_MODEL = "model.language_model"


class Embedding(nn.Module):
    """The token table, kept in the checkpoint's dtype: the rows that a prompt takes are few."""

    def __init__(self, dimensions: TextEncoderDimensions, stored: torch.dtype, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute
        self.embed_tokens = nn.Embedding(dimensions.vocab, dimensions.hidden, dtype=stored)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [L] to hidden rows [L, text]."""
        return self.embed_tokens(token_ids).to(self.compute)


class CausalAttention(nn.Module):
    """Grouped-query causal attention with RMS-normed, rotated queries and keys."""

    def __init__(self, dimensions: TextEncoderDimensions, compute: torch.dtype) -> None:
        super().__init__()
        self.head_dim = dimensions.head_dim
        queries, keys = dimensions.heads * self.head_dim, dimensions.kv_heads * self.head_dim
        self.q_proj = nn.Linear(dimensions.hidden, queries, bias=False, dtype=compute)
        self.k_proj = nn.Linear(dimensions.hidden, keys, bias=False, dtype=compute)
        self.v_proj = nn.Linear(dimensions.hidden, keys, bias=False, dtype=compute)
        self.o_proj = nn.Linear(queries, dimensions.hidden, bias=False, dtype=compute)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=dimensions.rms_eps, dtype=compute)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=dimensions.rms_eps, dtype=compute)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rows [L, text] to rows [L, text]; cos and sin are [L, head_dim]."""
        query = rotate_half(self._heads_first(self.q_norm(self._heads(self.q_proj(x)))), cos, sin)
        key = rotate_half(self._heads_first(self.k_norm(self._heads(self.k_proj(x)))), cos, sin)
        value = self._heads_first(self._heads(self.v_proj(x)))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.squeeze(0).transpose(0, 1).flatten(1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def _heads_first(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).unsqueeze(0)


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates heads x [1, heads, L, d]; the angles' cos and sin, [L, d], are rounded to x's dtype as upstream does."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


class GatedMLP(nn.Module):
    """SwiGLU with separate gate and up projections."""

    def __init__(self, dimensions: TextEncoderDimensions, compute: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dimensions.hidden, dimensions.intermediate, bias=False, dtype=compute)
        self.up_proj = nn.Linear(dimensions.hidden, dimensions.intermediate, bias=False, dtype=compute)
        self.down_proj = nn.Linear(dimensions.intermediate, dimensions.hidden, bias=False, dtype=compute)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [L, text] to rows [L, text]."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One decoder layer, pre-norm (spec/model.md 7.1). Parameters have transformers' names."""

    def __init__(self, dimensions: TextEncoderDimensions, compute: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(dimensions.hidden, eps=dimensions.rms_eps, dtype=compute)
        self.self_attn = CausalAttention(dimensions, compute)
        self.post_attention_layernorm = nn.RMSNorm(dimensions.hidden, eps=dimensions.rms_eps, dtype=compute)
        self.mlp = GatedMLP(dimensions, compute)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Hidden [L, text] to hidden [L, text], un-normed."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `text_encoder.embedding` and `text_encoder.layer` graphs; instance i of the latter is decoder layer i."""
    dimensions = checkpoint.dimensions.text_encoder
    parameters = checkpoint.parameters("text_encoder", partition)
    return _embedding(dimensions, parameters, compute), _layer(dimensions, parameters, compute)


def _embedding(dimensions: TextEncoderDimensions, parameters: Mapping[str, Weight], compute: torch.dtype) -> Graph:
    table = parameters[f"{_MODEL}.embed_tokens.weight"]
    return Graph(
        name=EMBEDDING,
        module=lambda: Embedding(dimensions, table.dtype, compute),
        inputs=(TensorSpec("token_ids", torch.int64, (TEXT_ROWS,), below=dimensions.vocab),),
        outputs=(TensorSpec("hidden", compute, (TEXT_ROWS, dimensions.hidden)),),
        weights=({"embed_tokens.weight": table},),
        compute=compute,
        trials=({"text_rows": 3}, {"text_rows": 19}),
    )


def _layer(dimensions: TextEncoderDimensions, parameters: Mapping[str, Weight], compute: torch.dtype) -> Graph:
    # Full width, so that positions of image tokens, which differ between the rotary sections, need no other graph.
    angles = (TEXT_ROWS, dimensions.head_dim)
    return Graph(
        name=LAYER,
        module=lambda: DecoderLayer(dimensions, compute),
        inputs=(
            TensorSpec("hidden", compute, (TEXT_ROWS, dimensions.hidden)),
            TensorSpec("cos", torch.float32, angles),
            TensorSpec("sin", torch.float32, angles),
        ),
        outputs=(TensorSpec("hidden_out", compute, (TEXT_ROWS, dimensions.hidden)),),
        weights=tuple(_layer_weights(parameters, f"{_MODEL}.layers.{i}.") for i in range(dimensions.layers)),
        compute=compute,
        trials=({"text_rows": 5}, {"text_rows": 33}),
    )


def _layer_weights(parameters: Mapping[str, Weight], prefix: str) -> dict[str, Weight]:
    return {name.removeprefix(prefix): weight for name, weight in parameters.items() if name.startswith(prefix)}
