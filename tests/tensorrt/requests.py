"""Requests for plans of small models written as text, and of emitted graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import parser

from engines.backends.tensorrt.expectation import expected
from engines.backends.tensorrt.request import Constant, PlanRequest
from engines.backends.tensorrt.shapes import optimisation_profiles
from engines.declaration import axes
from engines.store import AxisRange
from export.bake import bake
from export.emitted import Emitted

BOTH = ("8.9", "12.0")
"""Compute capabilities of the RTX cards that are built for, in one plan: it takes hardly longer than one of them."""

WORKSPACE = 64 << 30
"""Bytes; more than any test needs."""


def model(body: str) -> onnx.ModelProto:
    """A model of one graph, in ONNX's textual notation: `g (inputs) => (outputs) { nodes }`."""
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23, "h3" : 1]>\n{body}')


def attention(dtype: str, heads: int, size: int, decomposable: int) -> onnx.ModelProto:
    """One h3::Attention named "attend" over [1, heads, rows, size]."""
    shape = f"{dtype}[1, {heads}, rows, {size}]"
    return model(
        f"g ({shape} q, {shape} k, {shape} v) => ({shape} y)"
        f" {{ [attend] y = h3.Attention <scale: float = 0.1, TRT_decomposable: int = {decomposable}> (q, k, v) }}"
    )


def request(source: onnx.ModelProto, directory: Path, **changes: Any) -> PlanRequest:
    """A request for a small model, whose dynamic axes all run from 1 to 256."""
    file = directory / "model.onnx"
    file.write_bytes(source.SerializeToString())
    named = {d.dim_param for i in source.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    given: dict[str, Any] = {
        "graph": "sample",
        "flavour": "tensorrt_rtx",
        "model": file,
        "capabilities": BOTH,
        "profiles": ({name: AxisRange(minimum=1, optimum=256, maximum=256) for name in named},),
        "constants": {},
        "workspace_bytes": WORKSPACE,
        "timing_cache": None,
    }
    given |= changes
    return PlanRequest(expected=given.pop("expected", None) or expected(source), **given)


def emitted_request(
    emitted: Emitted, directory: Path, shapes: Mapping[str, tuple[int, ...]], baked: bool = False
) -> PlanRequest:
    """A request for an emitted graph: its weights as inputs, or those of its first instance inside."""
    source = bake(emitted, 0) if baked else emitted.model
    bound = emitted.bindings[0].items() if baked else ()
    return request(
        source,
        directory,
        graph=emitted.graph.name,
        profiles=optimisation_profiles(axes(emitted.graph, emitted.binding), shapes),
        constants={n: Constant(file=s.file, offset=s.offset, nbytes=s.nbytes) for n, s in bound},
    )
