"""NVFP4 layers in ONNX's own 4-bit type, which TensorRT makes products of 4-bit operands of."""

from __future__ import annotations

from dataclasses import replace

import onnx
from onnx import TensorProto

from plugins.op import DOMAIN
from plugins.ops import nvfp4_linear

_IR_VERSION = 11
"""The first version of the file format that has the 4-bit type."""


def native_fp4(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model whose NVFP4 layers use ONNX's type, and whose packed weights are declared FLOAT4E2M1 [N, K].

    Weights may be inputs, or baked as external data.

    The bytes to be bound stay the same: ONNX too has the first of two values in the low bits. ONNX Runtime has no
    kernels for the type on a CPU and runs the original.
    """
    native = onnx.ModelProto()
    native.CopyFrom(model)
    packed = {node.input[1] for node in native.graph.node if _is_nvfp4(node)}
    if not packed:
        return native
    native.ir_version = max(native.ir_version, _IR_VERSION)
    for value in native.graph.input:
        if value.name in packed:
            value.type.tensor_type.elem_type = TensorProto.FLOAT4E2M1
            value.type.tensor_type.shape.dim[1].dim_value *= 2
    for tensor in native.graph.initializer:
        if tensor.name in packed:
            tensor.data_type = TensorProto.FLOAT4E2M1
            tensor.dims[1] *= 2
    body = replace(nvfp4_linear.OP, body=nvfp4_linear.NATIVE_BODY).function()
    functions = [body if function.name == body.name else function for function in native.functions]
    del native.functions[:]
    native.functions.extend(functions)
    return native


def _is_nvfp4(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type == nvfp4_linear.OP.name
