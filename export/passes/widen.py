"""Half precisions to FLOAT: the graph without roundings, which ONNX Runtime can run on a CPU and eager can match."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import TensorProto, numpy_helper

_DTYPE_ATTRIBUTES = frozenset({"to", "dtype", "stash_type", "softmax_precision", "output_dtype"})

_HALVES = frozenset({TensorProto.BFLOAT16, TensorProto.FLOAT16})


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model in which every tensor, constant and cast of a half precision is FLOAT (spec/export.md 1)."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graph = wide.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in _HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    _widen_nodes(graph.node)
    for function in wide.functions:
        _widen_nodes(function.node)
    return wide


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in _DTYPE_ATTRIBUTES and attribute.i in _HALVES:
                attribute.i = TensorProto.FLOAT
            _widen_tensor(attribute.t)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _HALVES:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float32"), tensor.name))
