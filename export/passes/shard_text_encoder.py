"""The text encoder on the ranks of a group: each has some heads, and some channels of the feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from export.graphs.graph import Graph, TensorSpec
from export.graphs.text_encoder import DecoderLayer, Embedding
from export.passes.shard_tensors import check_ranks, divide_inputs, divide_outputs, sharded

_BY_OUTPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_BY_INPUTS = ("self_attn.o_proj", "mlp.down_proj")


class AttendPart(nn.Module):
    """What a rank's heads add to the hidden rows."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Hidden [L, text] to this rank's part of a sum, float32 [L, text]."""
        part: torch.Tensor = self.self_attn(self.input_layernorm(hidden), cos, sin)
        return part.float()


class FeedPart(nn.Module):
    """What a rank's inner channels add to the hidden rows."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [L, text] to this rank's part of a sum, float32 [L, text]."""
        part: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return part.float()


def shard_embedding(graph: Graph, ranks: int) -> Graph:
    """The token table, each rank with some columns: its output is [L, text / ranks].

    Raises:
        ShardError: the ranks do not divide the width.
    """
    (hidden,) = graph.outputs
    rows, width = hidden.shape
    assert isinstance(width, int)
    check_ranks(graph, ranks, {"columns": width})

    def module() -> nn.Module:
        whole = graph.module()
        assert isinstance(whole, Embedding)
        table = whole.embed_tokens
        whole.embed_tokens = nn.Embedding(table.num_embeddings, width // ranks, dtype=table.weight.dtype)
        return whole

    outputs = (replace(hidden, shape=(rows, width // ranks)),)
    return sharded(graph, module, ranks, {}, graph.inputs, outputs)


def shard_layer(graph: Graph, ranks: int) -> tuple[Graph, Graph]:
    """A decoder layer, quantised or not, as `text_encoder.layer.attend` and `text_encoder.layer.feed`.

    Each makes a rank's `part` of what is added to its hidden rows, float32: the sum over the ranks, which the caller
    takes.

    Raises:
        ShardError: the ranks do not divide its heads and inner channels.
    """
    _check(graph, ranks)
    hidden, cos, sin = graph.inputs
    outputs = (TensorSpec("part", torch.float32, hidden.shape),)

    def segment(name: str, kind: Callable[[DecoderLayer], nn.Module], *inputs: TensorSpec) -> Graph:
        name = f"{graph.name}.{name}"
        return sharded(graph, lambda: kind(_local(graph, ranks)), ranks, {}, inputs, outputs, name=name)

    return segment("attend", AttendPart, hidden, cos, sin), segment("feed", FeedPart, hidden)


def _check(graph: Graph, ranks: int) -> None:
    with torch.device("meta"):
        layer = graph.module()
    assert isinstance(layer, DecoderLayer)
    attention, inner = layer.self_attn, layer.mlp.gate_proj.out_features
    heads = (x.out_features // attention.head_dim for x in (attention.q_proj, attention.k_proj))
    names = ("query heads", "key and value heads", "inner channels")
    check_ranks(graph, ranks, dict(zip(names, (*heads, inner), strict=True)))


def _local(graph: Graph, ranks: int) -> DecoderLayer:
    """One rank's layer: its attention finds the number of its heads from the rows' width."""
    layer = graph.module()
    assert isinstance(layer, DecoderLayer)
    divide_outputs(layer, _BY_OUTPUTS, ranks)
    divide_inputs(layer, _BY_INPUTS, ranks)
    return layer
