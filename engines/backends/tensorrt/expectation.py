"""What a plan of an emitted model must hold: read from the model, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import TensorProto

from engines.backends.tensorrt.lowering import DOMAIN, NATIVE, lower
from engines.backends.tensorrt.request import Expected
from plugins.ops import fp8_linear, nvfp4_linear

QUANTISED_LINEARS = (fp8_linear.OP.name, nvfp4_linear.OP.name)
"""Operators of our domain whose matrix product must run in the type of its quantised weights."""

DTYPES: dict[int, str] = {
    TensorProto.FLOAT: "Float",
    TensorProto.FLOAT16: "Half",
    TensorProto.BFLOAT16: "BFloat16",
    TensorProto.FLOAT8E4M3FN: "FP8",
    TensorProto.FLOAT4E2M1: "FP4",
}
"""TensorRT's names of the element types that matrix products may have."""

_MATMULS = ("Gemm", "MatMul")
_MOVES = ("Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze")


def expected(model: onnx.ModelProto, plugins: tuple[str, ...] = ()) -> Expected:
    """What TensorRT must make of the model; `plugins` are the operators of our domain that plugins do.

    Every attention is to be one fused kernel, except where the model lets TensorRT decompose it: `TRT_decomposable` is
    1, or, for an `ai.onnx::Attention` that cannot say so, its query is float32. A matrix product whose operands both
    are dequantised runs in the type that they were quantised to.

    Raises:
        ValueError: a quantised linear has no matrix product of quantised operands, or one has no known type.
    """
    lowered = lower(model, plugins)
    types = _types(model, lowered)
    producers = {output: node for node in lowered.graph.node for output in node.output}
    matmuls = {n.name: _operand_type(lowered, n, types, producers) for n in lowered.graph.node if _is_matmul(n)}
    _check_quantised(model, matmuls)
    return Expected(
        attention_nodes=tuple(n.name for n in lowered.graph.node if _is_attention(n) and _must_fuse(n, types)),
        matmul_nodes=matmuls,
        collective_nodes=tuple(n.name for n in lowered.graph.node if n.op_type == "DistCollective"),
        plugins=tuple(n.op_type for n in lowered.graph.node if n.domain == DOMAIN and n.op_type not in NATIVE),
    )


def _is_matmul(node: onnx.NodeProto) -> bool:
    return node.domain == "" and node.op_type in _MATMULS


def _is_attention(node: onnx.NodeProto) -> bool:
    return node.op_type == "Attention"


def _must_fuse(node: onnx.NodeProto, types: Mapping[str, int]) -> bool:
    decomposable = next((a.i for a in node.attribute if a.name == "TRT_decomposable"), None)
    return types.get(node.input[0]) != TensorProto.FLOAT if decomposable is None else not decomposable


def _types(model: onnx.ModelProto, lowered: onnx.ModelProto) -> dict[str, int]:
    """Element types by tensor name. Where a function stays a node, its output has the type that inlining it gives."""
    whole = onnx.inliner.inline_local_functions(model)
    known: dict[str, int] = {}
    for each in (lowered, whole):
        graph = onnx.shape_inference.infer_shapes(each).graph
        values = (*graph.input, *graph.output, *graph.value_info)
        known |= {v.name: v.type.tensor_type.elem_type for v in values}
        known |= {i.name: i.data_type for i in graph.initializer}
    return known


def _operand_type(
    model: onnx.ModelProto, node: onnx.NodeProto, types: Mapping[str, int], producers: Mapping[str, onnx.NodeProto]
) -> str:
    quantised = [_quantised_type(name, types, producers) for name in node.input[:2]]
    kind = quantised[0] if quantised[0] and quantised[0] == quantised[1] else types.get(node.input[0])
    if kind not in DTYPES:
        place = f"graph {model.graph.name}: {node.op_type} {node.name}"
        raise ValueError(
            f"{place}: element type {kind} of {node.input[0]}: must be one of {', '.join(DTYPES.values())}"
        )
    return DTYPES[kind]


def _quantised_type(name: str, types: Mapping[str, int], producers: Mapping[str, onnx.NodeProto]) -> int | None:
    """The type that a tensor is dequantised from, if it is."""
    for node in _back(name, producers):
        if node.op_type == "DequantizeLinear":
            return types.get(node.input[0])
        if node.op_type not in _MOVES:
            return None
    return None


def _back(name: str, producers: Mapping[str, onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The node that makes a tensor, the one that makes that node's first input, and so on."""
    while name in producers:
        yield producers[name]
        name = producers[name].input[0] if producers[name].input else ""


def _check_quantised(model: onnx.ModelProto, matmuls: Mapping[str, str]) -> None:
    linears = [n for n in model.graph.node if n.domain == DOMAIN and n.op_type in QUANTISED_LINEARS]
    found = sum(kind in ("FP8", "FP4") for kind in matmuls.values())
    if found < len(linears):
        names = ", ".join(n.name for n in linears[:5])
        raise ValueError(
            f"graph {model.graph.name}: {len(linears)} matrix products of quantised operands expected, of {names}; "
            f"{found} found"
        )
