"""Runs a graph's module on a checkpoint's bytes, and loads the upstream class that it is compared with."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.inliner
import torch

from export.binding import bind
from export.checkpoint import Checkpoint, materialise
from export.checkpoint.tree import Component
from export.emitted import Emitted
from export.graphs.graph import Graph
from export.trace import BoundModule


def eager(graph: Graph, *inputs: torch.Tensor, instance: int = 0) -> torch.Tensor:
    """The output of the graph's module under one instance's weights."""
    binding = bind(graph)
    weights = tuple(materialise(binding.instances[instance][weight.name]) for weight in binding.inputs)
    with torch.no_grad():
        return BoundModule(graph, binding, instance)(inputs, weights)


def load(model: Any, checkpoint: Checkpoint, component: Component) -> Any:
    """An upstream model in float32 with the checkpoint's parameters."""
    values = {name: materialise(weight).float() for name, weight in checkpoint.parameters(component).items()}
    model.load_state_dict(values, strict=True)
    return model.eval().requires_grad_(False)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference in units of the largest expected magnitude."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def bound_keys(emitted: Emitted) -> list[str]:
    """The stored keys that all instances together are bound to; a key that two bind appears twice."""
    return sorted(stored.key for instance in emitted.bindings for stored in instance.values())


def element_types(model: onnx.ModelProto) -> set[str]:
    """Element types of every value and constant of a model, functions included."""
    inferred = onnx.shape_inference.infer_shapes(onnx.inliner.inline_local_functions(model))
    graph = inferred.graph
    values = [v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)]
    constants = [a.t.data_type for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.TENSOR]
    numbers = {*values, *constants, *(i.data_type for i in graph.initializer)}
    return {onnx.TensorProto.DataType.Name(n) for n in numbers}
