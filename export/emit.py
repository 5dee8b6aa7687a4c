"""A graph becomes an ONNX file without weights: traced under fake tensors, named, given its functions, and checked.

The recipe is spec/export.md 5: weights are graph inputs from the start, so that no pass can merge, fold or copy them.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import onnx
import onnx_ir as ir
import torch

from export.bake import bake
from export.binding import bind
from export.compare import Comparison, compare
from export.emitted import Emitted
from export.graphs.graph import Graph
from export.passes.name_tensors import name_tensors
from export.passes.tidy import LARGEST_CONSTANT, tidy
from export.trace import trace
from plugins.op import DOMAIN, DOMAIN_VERSION, ONNX_OPSET, Op
from plugins.registry import REGISTRY
from plugins.translation import translation_table

__all__ = ["Comparison", "EmitError", "Emitted", "bake", "compare", "emit"]


class EmitError(ValueError):
    """An emitted model breaks a rule that every model must keep."""


def emit(graph: Graph, ops: Sequence[Op] = REGISTRY) -> Emitted:
    """Traces the graph and gives its checked ONNX model; `ops` are the `h3` operations that it may use.

    Raises:
        BindingError: the graph's weights do not fit its module.
        DeclarationError: the traced inputs or outputs are not the declared ones.
        EmitError: a rule of the model is broken (float64 inside, an operator outside the registry, data inside).
    """
    binding = bind(graph)
    model = _to_onnx(trace(graph, binding), ops)
    name_tensors(model, (*graph.inputs, *binding.inputs), graph.outputs)
    proto = ir.to_proto(tidy(model))
    proto.graph.name = graph.name
    attach_functions(proto, ops)
    check(proto)
    return Emitted(graph, proto, binding, census(proto))


def attach_functions(model: onnx.ModelProto, ops: Sequence[Op] = REGISTRY) -> None:
    """Adds the function body of each `h3` operator that the model uses, what those call, and their domain."""
    used = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    found = [op for op in ops if op.name in used]
    called = {function.name: function for op in found for function in op.called_functions()}
    model.functions.extend([*(op.function() for op in found), *called.values()])
    if used and DOMAIN not in {o.domain for o in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, DOMAIN_VERSION))


def census(model: onnx.ModelProto) -> dict[str, int]:
    """Operators of the main graph, counted as "domain::Op"."""
    return dict(sorted(Counter(f"{node.domain or 'ai.onnx'}::{node.op_type}" for node in model.graph.node).items()))


def check(model: onnx.ModelProto) -> None:
    """The ONNX checker, strict shape inference, and our own rules.

    Raises:
        EmitError: float64 anywhere, or an initializer of more than `LARGEST_CONSTANT` bytes (a weight has leaked).
    """
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    if doubles := list(_doubles(inferred)):
        raise EmitError(f"graph {model.graph.name}: float64 at {doubles}")
    large = [i.name for i in model.graph.initializer if i.ByteSize() > LARGEST_CONSTANT]
    if large:
        raise EmitError(f"graph {model.graph.name}: constants of weight size: {large}")


def _doubles(model: onnx.ModelProto) -> Iterator[str]:
    double = onnx.TensorProto.DOUBLE
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == double:
            yield value.name
    yield from (i.name for i in graph.initializer if i.data_type == double)
    for node in (*graph.node, *(n for f in model.functions for n in f.node)):
        for attribute in node.attribute:
            if attribute.t.data_type == double or (attribute.name in ("to", "dtype") and attribute.i == double):
                yield f"{node.op_type} {node.name}"


def _to_onnx(program: torch.export.ExportedProgram, ops: Sequence[Op]) -> ir.Model:
    # With them the exporter writes a check of every input's every size, in time quadratic in the number of weights.
    program.example_inputs = None
    with _quiet():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=ONNX_OPSET,
            optimize=False,
            verbose=False,
            custom_translation_table=translation_table(ops),
        )
    assert exported is not None  # None is for callers that name a file
    return exported.model


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's remarks about itself; its errors are exceptions."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
