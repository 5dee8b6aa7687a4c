"""The text encoder on the ranks of a group: each has some heads, and some channels of the feed-forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from export.graphs.graph import Graph, TensorSpec
from export.graphs.group_input import group_input
from export.graphs.text_encoder import EMBEDDING, LAYER, DecoderLayer, Embedding
from export.passes.shard_tensors import check_ranks, divide_inputs, divide_outputs, divided, sharded
from plugins.ops.all_reduce import OP as ALL_REDUCE

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


class SummedLayer(nn.Module):
    """A rank's part of a decoder layer, which takes the sums over the ranks of `group` itself."""

    def __init__(self, layer: DecoderLayer, ranks: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.ranks = ranks

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        """Hidden [L, text] to hidden [L, text], the same on all ranks."""
        hidden = self._add(hidden, self.self_attn(self.input_layernorm(hidden), cos, sin), group)
        return self._add(hidden, self.mlp(self.post_attention_layernorm(hidden)), group)

    def _add(self, hidden: torch.Tensor, part: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        return hidden + ALL_REDUCE(part.float(), group, self.ranks).to(hidden.dtype)


def shard_text_encoder(graph: Graph, ranks: int, segmented: bool) -> tuple[Graph, ...]:
    """One of the text encoder's graphs, quantised or not, for each of `ranks` ranks.

    The embedding makes a rank's columns of the hidden rows. A layer is one graph, which sums over the ranks itself;
    `segmented`, it is two, `text_encoder.layer.attend` and `text_encoder.layer.feed`: each makes a rank's `part` of
    what is added to the hidden rows, float32, and the caller sums.

    Raises:
        ShardError: the ranks do not divide its columns, heads or inner channels.
    """
    if graph.name == EMBEDDING:
        return (_embedding(graph, ranks),)
    _check(graph, ranks)
    hidden, cos, sin = graph.inputs
    outputs = (TensorSpec("part", torch.float32, hidden.shape),)

    def segment(name: str, kind: Callable[[DecoderLayer], nn.Module], *inputs: TensorSpec) -> Graph:
        return sharded(graph, lambda: kind(_local(graph, ranks)), ranks, {}, inputs, outputs, name=f"{LAYER}.{name}")

    if segmented:
        return segment("attend", AttendPart, hidden, cos, sin), segment("feed", FeedPart, hidden)
    inputs = (*graph.inputs, group_input(ranks))
    return (sharded(graph, lambda: SummedLayer(_local(graph, ranks), ranks), ranks, {}, inputs, graph.outputs),)


def _embedding(graph: Graph, ranks: int) -> Graph:
    (hidden,) = graph.outputs
    width = hidden.shape[1]
    assert isinstance(width, int)
    check_ranks(graph, ranks, {"columns": width})

    def module() -> nn.Module:
        whole = graph.module()
        assert isinstance(whole, Embedding)
        table = whole.embed_tokens
        whole.embed_tokens = nn.Embedding(table.num_embeddings, width // ranks, dtype=table.weight.dtype)
        return whole

    return sharded(graph, module, ranks, {}, graph.inputs, (divided(hidden, 1, ranks),))


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
