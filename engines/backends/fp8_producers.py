"""Has what makes the rows of FP8 linears quantise them in the same pass, by kernels of our own.

What inductor fuses by itself reads wide rows twice: at the model's sizes a SwiGLU takes it 2.3 ms, and the kernel 1.1
(bench/results/rows.json).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from plugins.op import Op
from plugins.ops import fp8_linear, gated_residual, modulated_rms_norm, quantised_rows, swiglu


def quantise_in_producers(graph: Graph) -> None:
    """Replaces FP8 linears on bfloat16 rows [S, K] by a product of what is quantised where it is made."""
    linears = [node for node in graph.nodes if node.target is fp8_linear.OP.overload and _on_tensor_cores(node)]
    for x in dict.fromkeys(_argument(node, 0) for node in linears):
        readers = [node for node in linears if node.args[0] is x]
        producer = _producer(x) if set(x.users) == set(readers) else quantised_rows.ROWS
        if producer is None:
            continue
        arguments = (x,) if producer is quantised_rows.ROWS else x.args
        with graph.inserting_before(readers[0]):
            made = graph.call_function(producer.overload, arguments)
            values, scale = (graph.call_function(operator.getitem, (made, place)) for place in range(2))
        for reader in readers:
            _replace(graph, reader, values, scale)
        if not x.users:
            graph.erase_node(x)


def _producer(x: Node) -> Op | None:
    """The op that makes quantised rows in place of x; None where inductor does it as well."""
    if x.target is swiglu.OP.overload:
        return quantised_rows.SWIGLU
    if x.target is not modulated_rms_norm.OP.overload:
        return quantised_rows.ROWS
    # After a gated residual inductor makes one kernel of the sum, the norm and the quantisation. It takes 1.1 to 1.2 ms
    # of a block (bench/results/block.json), as a residual and a norm of our own do (rows.json).
    follows_residual = _argument(x, 0).target is gated_residual.OP.overload
    return None if follows_residual else quantised_rows.NORM


def _replace(graph: Graph, linear: Node, values: Node, scale: Node) -> None:
    weight, weight_scale = linear.args[1:]
    with graph.inserting_before(linear):
        columns = graph.call_function(torch.ops.aten.t.default, (weight,))
        channel_scale = graph.call_function(torch.ops.aten.unsqueeze.default, (weight_scale, 0))
        operands = values, columns, scale, channel_scale
        product = graph.call_function(
            torch.ops.aten._scaled_mm.default, (*operands, None, None, torch.bfloat16, fp8_linear.FAST_SUMS)
        )
    linear.replace_all_uses_with(product)
    graph.erase_node(linear)


def _on_tensor_cores(linear: Node) -> bool:
    x, weight = (_value(_argument(linear, place)) for place in range(2))
    return (
        x.dtype == torch.bfloat16
        and x.ndim == 2
        and not any(size % fp8_linear.TENSOR_CORE_MULTIPLE for size in weight.shape)
    )


def _argument(node: Node, place: int) -> Node:
    argument = node.args[place]
    assert isinstance(argument, Node)
    return argument


def _value(node: Node) -> Any:
    """The fake tensor that a trace has recorded for a node."""
    return node.meta["val"]
