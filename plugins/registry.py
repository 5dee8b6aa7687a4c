"""The operations of domain `h3`. A new one is a file in `plugins/ops` and a line here."""

from __future__ import annotations

from plugins.op import Op
from plugins.ops import (
    alias_free_snake,
    all_reduce,
    attention,
    dense_attention,
    fp8_linear,
    frame_norm,
    gated_residual,
    modulated_rms_norm,
    norm_rotary,
    nvfp4_linear,
    quantised_rows,
    sage_attention,
    skip_softmax_attention,
    snake,
    swiglu,
    ulysses_all_to_all,
    video_sparse_attention,
)

REGISTRY: tuple[Op, ...] = (
    alias_free_snake.OP,
    all_reduce.OP,
    attention.OP,
    dense_attention.OP,
    fp8_linear.OP,
    frame_norm.OP,
    gated_residual.OP,
    modulated_rms_norm.OP,
    norm_rotary.OP,
    nvfp4_linear.OP,
    quantised_rows.NORM,
    quantised_rows.ROWS,
    quantised_rows.SWIGLU,
    sage_attention.OP,
    skip_softmax_attention.OP,
    snake.OP,
    swiglu.OP,
    ulysses_all_to_all.HEADS,
    ulysses_all_to_all.GATED_HEADS,
    ulysses_all_to_all.ROWS,
    video_sparse_attention.OP,
)


def find(name: str) -> Op:
    """The entry of that ONNX operator name.

    Raises:
        KeyError: no entry has it.
    """
    found = next((op for op in REGISTRY if op.name == name), None)
    if found is None:
        raise KeyError(f"h3::{name} is not in plugins.registry; known: {', '.join(op.name for op in REGISTRY)}")
    return found
