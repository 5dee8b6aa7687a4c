"""From an emitted model to TensorRT's network: parsed, its weights given from mapped files, attentions marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from engines.backends.tensorrt.request import Constant, PlanError, PlanRequest
from engines.tensorrt import Flavour

if TYPE_CHECKING:
    import tensorrt as trt


def parse(
    flavour: Flavour, request: PlanRequest, model: onnx.ModelProto, network: trt.INetworkDefinition, logger: trt.ILogger
) -> list[Any]:
    """Fills the network. What is returned must live as long as the network: its weights lie there.

    Raises:
        PlanError: an operator that TensorRT does not take, or a weight whose data do not fit.
    """
    trt = flavour.module
    parser = trt.OnnxParser(network, logger)
    if not parser.load_model_proto(model.SerializeToString()):
        raise _refusal(request, parser)
    maps = _give_weights(request, model, parser)
    if not parser.parse_model_proto():
        raise _refusal(request, parser)
    _mark_attentions(flavour, request, model, network)
    return [*maps, parser]


def _give_weights(request: PlanRequest, model: onnx.ModelProto, parser: trt.OnnxParser) -> list[np.memmap[Any, Any]]:
    """Hands over each external initializer where its file is mapped; nothing is copied."""
    _check_external(request, model)
    maps = []
    for name, constant in request.constants.items():
        data = _map(request, name, constant)
        maps.append(data)
        if not parser.load_initializer(name, data.ctypes.data, data.nbytes):
            raise _refusal(request, parser, f"weight {name}, {data.nbytes:,} bytes of {constant.file}: ")
    return maps


def _map(request: PlanRequest, name: str, constant: Constant) -> np.memmap[Any, Any]:
    try:
        return np.memmap(constant.file, mode="r", offset=constant.offset, shape=(constant.nbytes,))
    except (OSError, ValueError) as error:  # numpy raises ValueError where the file is too short
        place = f"{constant.nbytes:,} bytes at {constant.offset:,} of {constant.file}"
        raise PlanError(f"graph {request.graph}: weight {name}: {place} cannot be read: {error}") from error


def _check_external(request: PlanRequest, model: onnx.ModelProto) -> None:
    external = {i.name for i in model.graph.initializer if i.data_location == onnx.TensorProto.EXTERNAL}
    if odd := external ^ set(request.constants):
        raise PlanError(
            f"graph {request.graph}: constants must say where each external initializer lies, and nothing else: "
            f"{', '.join(sorted(odd))}"
        )


def _mark_attentions(
    flavour: Flavour, request: PlanRequest, model: onnx.ModelProto, network: trt.INetworkDefinition
) -> None:
    """Lets TensorRT build from several kernels each attention that need not be one; an `ai.onnx` node cannot say so."""
    trt = flavour.module
    outputs = {node.output[0]: node.name for node in model.graph.node if node.op_type == "Attention"}
    for layer in _layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the network hands out every layer as an ILayer
            attention = _attention(layer)
            if outputs.get(attention.get_output(0).name) not in request.expected.attention_nodes:
                attention.decomposable = True


def _attention(layer: trt.IAttentionInputLayer) -> trt.IAttention:
    return layer.attention


def _layers(network: trt.INetworkDefinition) -> Iterator[trt.ILayer]:
    for index in range(network.num_layers):
        yield network.get_layer(index)


def _refusal(request: PlanRequest, parser: trt.OnnxParser, what: str = "") -> PlanError:
    """What the parser holds against the model: node, operator, reason."""
    reasons = [_reason(parser.get_error(index)) for index in range(parser.num_errors)]
    return PlanError(f"graph {request.graph}: {what}" + ("\n".join(reasons) or "the parser gives no reason"))


def _reason(error: trt.ParserError) -> str:
    node = f"node {error.node_name()} ({error.node_operator()}): " if error.node_operator() else ""
    return f"{node}{error.desc()}"


def named_inputs(model: onnx.ModelProto) -> Mapping[str, tuple[str, ...]]:
    """For each input, the name of each dimension's axis; empty where its size is fixed."""
    return {
        value.name: tuple(dimension.dim_param for dimension in value.type.tensor_type.shape.dim)
        for value in model.graph.input
    }
