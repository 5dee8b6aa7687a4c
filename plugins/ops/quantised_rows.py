"""What FP8 linears read, made by what makes their rows: a norm, a SwiGLU or attention, quantised in the same pass.

Each op is another one followed by `fp8_linear.quantise_rows`, in float32 throughout: the rows are never rounded to the
dtype that they would have had in between. Results are values [S, K] E4M3 and their row's scale [S, 1] float32.
"""

from __future__ import annotations

import torch

from plugins.op import Fast, Op
from plugins.ops import modulated_rms_norm, swiglu
from plugins.ops.fp8_linear import E4M3, E4M3_MAX, quantise_rows, scaled_rows

Quantised = tuple[torch.Tensor, torch.Tensor]
"""Values E4M3 and their rows' scales [S, 1] float32."""

CAPABILITY = (8, 9)
"""Least compute capability with E4M3 conversions and products."""

RESULTS = ("values", "row_scale")
RESULT_TYPES = ("tensor(float8e4m3fn)", "tensor(float)")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _fake(x: torch.Tensor) -> Quantised:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((x.shape[0], 1), dtype=wide)


def rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of x [S, K]."""
    values, scale = quantise_rows(_wide(x))
    return values, scale


def rows_fake(x: torch.Tensor) -> Quantised:
    """Values and scale of x's rows, without data."""
    return _fake(x)


def rows_kernel(x: torch.Tensor) -> Quantised:
    """A kernel in the Triton language; rows may lie apart."""
    from plugins.kernels import rows

    return rows_reference(x) if x.dtype == torch.float64 else rows.quantise_rows(x)


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`up * silu(gate)`: both [S, K], which may be halves of wider rows."""
    values, scale = quantise_rows(swiglu.reference(_wide(gate), _wide(up)))
    return values, scale


def swiglu_fake(gate: torch.Tensor, up: torch.Tensor) -> Quantised:
    """Values and scale of as many rows as the gate has, without data."""
    return _fake(gate)


def swiglu_kernel(gate: torch.Tensor, up: torch.Tensor) -> Quantised:
    """A kernel in the Triton language: half the time of what torch.compile fuses (bench/results/rows.json)."""
    from plugins.kernels import rows

    return swiglu_reference(gate, up) if gate.dtype == torch.float64 else rows.swiglu_fp8(gate, up)


def norm_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`modulated_rms_norm.reference` of rows x [S, K]."""
    wide = _wide(x), _wide(weight), _wide(scale), _wide(shift)
    values, row_scale = quantise_rows(modulated_rms_norm.reference(*wide, index, eps))
    return values, row_scale


def norm_fake(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, eps: float
) -> Quantised:
    """Values and scale of x's rows, without data."""
    return _fake(x)


def norm_kernel(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, eps: float
) -> Quantised:
    """A kernel in the Triton language; rows may lie apart."""
    from plugins.kernels import rows

    if x.dtype == torch.float64:
        return norm_reference(x, weight, scale, shift, index, eps)
    return rows.modulated_rms_norm_fp8(x, weight, scale, shift, index, eps)


_QUANTISED = """
    one_scale = Constant <value = float {1.0}> ()
    values = QuantizeLinear <output_dtype = 17> (scaled_x, one_scale)
"""

_SWIGLU_BODY = """
    wide_gate = Cast <to = 1> (gate)
    wide_up = Cast <to = 1> (up)
    open = Sigmoid (wide_gate)
    activated = Mul (wide_gate, open)
    product = Mul (wide_up, activated)
"""

ROWS = Op(
    "quantised_rows",
    rows_reference,
    rows_fake,
    scaled_rows(E4M3_MAX) + _QUANTISED,
    fast=(Fast("cuda", rows_kernel, minimum=CAPABILITY),),
    results=RESULTS,
    result_types=RESULT_TYPES,
)

SWIGLU = Op(
    "quantised_swiglu",
    swiglu_reference,
    swiglu_fake,
    _SWIGLU_BODY + scaled_rows(E4M3_MAX, "product") + _QUANTISED,
    fast=(Fast("cuda", swiglu_kernel, minimum=CAPABILITY),),
    results=RESULTS,
    result_types=RESULT_TYPES,
)

NORM = Op(
    "quantised_modulated_rms_norm",
    norm_reference,
    norm_fake,
    modulated_rms_norm.SHIFTED + scaled_rows(E4M3_MAX, "shifted") + _QUANTISED,
    fast=(Fast("cuda", norm_kernel, minimum=CAPABILITY),),
    results=RESULTS,
    result_types=RESULT_TYPES,
)
