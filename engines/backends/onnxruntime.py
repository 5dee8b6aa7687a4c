"""Engines for ONNX Runtime on CPUs: an emitted model in the operators that its CPU provider runs best.

`h3::Attention` becomes `com.microsoft::MultiHeadAttention`, whose CPU kernel streams over rows (at 18,788 rows and
8 heads 0.6 GB where the scores alone would be 11 GB); every other `h3` operator is replaced by its function body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx
import onnx.inliner
import onnxruntime as ort
from onnx import TensorProto, helper

from engines.sessions.onnxruntime import session_options
from plugins.exchanges import OPERATORS
from plugins.op import DOMAIN

MICROSOFT = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""


class LoweringError(ValueError):
    """A model that cannot become an engine of this backend; says graph, node and rule."""


def lower(model: onnx.ModelProto) -> onnx.ModelProto:
    """The engine of an emitted model, weights as inputs.

    Raises:
        LoweringError: an attention whose number of heads or head size is not fixed.
    """
    shapes = _shapes(model)
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    del lowered.graph.node[:]
    for node in model.graph.node:
        lowered.graph.node.extend(_multi_head_attention(model, node, shapes) if _is_attention(node) else [node])
    lowered.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    lowered = onnx.inliner.inline_local_functions(lowered)
    used = {node.domain for node in lowered.graph.node}
    kept = [opset for opset in lowered.opset_import if opset.domain in used | {""}]
    del lowered.opset_import[:]
    lowered.opset_import.extend(kept)
    return lowered


def check(engine: onnx.ModelProto, emitted: onnx.ModelProto) -> dict[str, int]:
    """Counts the engine's operators as "domain::Op", and fails where it is not what the emitted model asked for.

    Raises:
        LoweringError: it exchanges between ranks, an attention is not fused, an `h3` operator is left, or ONNX Runtime
            does not load the engine with the emitted model's inputs and outputs.
    """
    census = Counter(f"{node.domain or 'ai.onnx'}::{node.op_type}" for node in engine.graph.node)
    wanted = sum(_is_attention(node) for node in emitted.graph.node)
    fused = census[f"{MICROSOFT}::MultiHeadAttention"]
    name = emitted.graph.name
    if shared := [node.name for node in emitted.graph.node if _needs_ranks(node)]:
        raise LoweringError(
            f"graph {name}: exchanges between ranks at {', '.join(shared)}: ONNX Runtime's engines have one rank each; "
            f"the graph must be cut there"
        )
    if fused != wanted:
        raise LoweringError(f"graph {name}: {wanted} fused attentions expected, {fused} found")
    if left := sorted(op for op in census if op.startswith(f"{DOMAIN}::")):
        raise LoweringError(f"graph {name}: operators that ONNX Runtime does not have: {', '.join(left)}")
    _check_loads(engine, emitted)
    return dict(sorted(census.items()))


def _check_loads(engine: onnx.ModelProto, emitted: onnx.ModelProto) -> None:
    name = emitted.graph.name
    try:
        session = ort.InferenceSession(
            engine.SerializeToString(), session_options(threads=1), providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise LoweringError(f"graph {name}: ONNX Runtime {ort.__version__} does not load it: {error}") from error
    for kind, loaded, declared in (
        ("inputs", session.get_inputs(), emitted.graph.input),
        ("outputs", session.get_outputs(), emitted.graph.output),
    ):
        found, expected = [x.name for x in loaded], [x.name for x in declared]
        if found != expected:
            raise LoweringError(f"graph {name}: {kind} {expected} expected, {found} found")


def _needs_ranks(node: onnx.NodeProto) -> bool:
    """Whether it is of several ranks: its function, which would run, is for one."""
    return node.op_type in OPERATORS and any(a.name == "ranks" and a.i > 1 for a in node.attribute)


def _is_attention(node: onnx.NodeProto) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, "Attention")


def _multi_head_attention(
    model: onnx.ModelProto, node: onnx.NodeProto, shapes: Mapping[str, tuple[int | None, ...]]
) -> list[onnx.NodeProto]:
    """Nodes from query, key, value [B, H, S, d] to the result [B, H, S, d].

    The kernel streams only where all three come as [B, S, H * d] (it takes key and value as [B, H, S, d] too, but then
    makes the whole score matrix); it returns [B, S, H * d].
    """
    (query, key, value), (result,) = node.input, node.output
    heads, size = _heads(model, query, shapes)
    scale = next(a.f for a in node.attribute if a.name == "scale")
    joined, split = f"{result}_joined_shape", f"{result}_split_shape"
    rows = [f"{result}_{role}" for role in ("query", "key", "value")]
    attention = helper.make_node(
        "MultiHeadAttention", rows, [f"{result}_joined"], domain=MICROSOFT, num_heads=heads, scale=scale
    )
    return [
        _int64s(joined, [0, 0, heads * size]),
        _int64s(split, [0, 0, heads, size]),
        *(n for x, y in zip((query, key, value), rows, strict=True) for n in _join_heads(x, y, joined)),
        attention,
        helper.make_node("Reshape", [f"{result}_joined", split], [f"{result}_split"]),
        helper.make_node("Transpose", [f"{result}_split"], [result], perm=[0, 2, 1, 3]),
    ]


def _join_heads(tensor: str, rows: str, shape: str) -> list[onnx.NodeProto]:
    """Nodes from [B, H, S, d] to [B, S, H * d]; the transposition cancels the one that made the heads."""
    return [
        helper.make_node("Transpose", [tensor], [f"{rows}_split"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", [f"{rows}_split", shape], [rows]),
    ]


def _heads(model: onnx.ModelProto, query: str, shapes: Mapping[str, tuple[int | None, ...]]) -> tuple[int, int]:
    """Number of heads and head size of a query [B, H, S, d]."""
    shape = shapes.get(query, ())
    heads, size = (shape[1], shape[3]) if len(shape) == 4 else (None, None)
    if heads is None or size is None:
        raise LoweringError(
            f"graph {model.graph.name}: attention query {query}: shape [batch, heads, rows, size] with fixed heads "
            f"and size expected, found {list(shape)}"
        )
    return heads, size


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Inferred shapes by tensor name; None where a size is not fixed."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    return {
        value.name: tuple(d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info, *graph.output)
    }


def _int64s(name: str, values: list[int]) -> onnx.NodeProto:
    tensor = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
    return helper.make_node("Constant", [], [name], value=tensor)
