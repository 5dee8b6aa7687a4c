"""A linear layer of 8-bit floats: E4M3 weights with a scale for each output channel, rows quantised as they come."""

from __future__ import annotations

import torch

from plugins.op import Fast, Op

E4M3 = torch.float8_e4m3fn

E4M3_MAX = 448.0
"""Largest finite E4M3 value (OCP 8-bit floating point specification, 5.1)."""

SCALE_FLOOR = 1e-30
"""Least scale of a row, so that a row of zeros gives zeros; far enough from float32's subnormals to divide by."""

FAST_SUMS = True
"""Products are summed inside the tensor cores, on Hopper with about 14 bits (arXiv 2412.19437, 3.3.2): at the model's
sizes an H200 is a tenth faster so, and results are off by 3.75% of their length either way, which is the operands'
rounding (bench/results/gemm.json)."""

TENSOR_CORE_MULTIPLE = 16
"""cuBLASLt takes 8-bit operands whose sizes are multiples of this."""


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as E4M3 and their scales: `x = values * scale`, with the row's largest magnitude at 448.

    x [.., K] float32 or float64; returns values [.., K] E4M3, rounded to nearest even, and scale [.., 1] in x's dtype.
    """
    scale = (x.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(SCALE_FLOOR)
    # Torch turns what lies above the largest value into NaN; the quotient's rounding can put it there.
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def reference(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """`x @ (weight * weight_scale)^T` of rows rounded to E4M3.

    x [.., K]; weight [N, K] float8_e4m3fn; weight_scale [N] float32; returns [.., N] in x's dtype. Products of E4M3
    values are exact in float32, where they are summed; both scales are applied to the sums, which are rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    values, scale = quantise_rows(x.to(wide))
    return (values.to(wide) @ weight.to(wide).T * scale * weight_scale.to(wide)).to(x.dtype)


def fake(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Rows of x's dtype, as wide as the weight has channels."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def scaled_mm(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """The product on FP8 tensor cores (compute capability 8.9 and up).

    Sizes that they do not take go the reference's way.
    """
    channels, inner = weight.shape
    if channels % TENSOR_CORE_MULTIPLE or inner % TENSOR_CORE_MULTIPLE or not x.numel():
        return reference(x, weight, weight_scale)
    values, scale = _quantise_quickly(x.reshape(-1, inner).float())
    # The second operand is wanted column by column, which is how [N, K] rows lie.
    if x.dtype == torch.bfloat16:
        scales = scale, weight_scale.unsqueeze(0)
        result = torch._scaled_mm(values, weight.T, *scales, out_dtype=x.dtype, use_fast_accum=FAST_SUMS)
    else:
        # Scales by row and channel are for bfloat16 results only.
        one = scale.new_ones(())
        sums = torch._scaled_mm(values, weight.T, one, one, out_dtype=torch.float32, use_fast_accum=FAST_SUMS)
        result = (sums * scale * weight_scale).to(x.dtype)
    return result.reshape(*x.shape[:-1], channels)


def _quantise_quickly(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantise_rows`, with one division a row instead of one an element, which kernels of this kind wait for.

    The product with a reciprocal is off by an ulp of float32, which E4M3's rounding sees once in some ten thousand.
    """
    scale = (x.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(SCALE_FLOOR)
    return (x * scale.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def scaled_rows(largest: float, x: str = "x") -> str:
    """Statements that make `row_scale` and `scaled_x` in a function's body: rows of x, scaled up to `largest`."""
    return f"""
    magnitude = Abs ({x})
    last = Constant <value_ints = [-1]> ()
    amax = ReduceMax <keepdims = 1> (magnitude, last)
    wide_amax = Cast <to = 1> (amax)
    largest = Constant <value_float = {largest}> ()
    exact_scale = Div (wide_amax, largest)
    floor = Constant <value_float = {SCALE_FLOOR}> ()
    row_scale = Max (exact_scale, floor)
    wide_rows = Cast <to = 1> ({x})
    scaled_x = Div (wide_rows, row_scale)
"""


# TensorRT takes no scale by row in QuantizeLinear; with a scale of one on both sides its importer fuses the pairs into
# a product of 8-bit operands, and the true scales are applied to the sums.
_PRODUCT = """
    one = Constant <value = float {1.0}> ()
    quantised_x = QuantizeLinear <output_dtype = 17> (scaled_x, one)
    values = DequantizeLinear (quantised_x, one)
    wide_weight = DequantizeLinear (weight, one)
    columns = Transpose <perm = [1, 0]> (wide_weight)
    sums = MatMul (values, columns)
    row_scaled = Mul (sums, row_scale)
    scaled = Mul (row_scaled, weight_scale)
    result = CastLike (scaled, x)
"""

OP = Op(
    "fp8_linear",
    reference,
    fake,
    scaled_rows(E4M3_MAX) + _PRODUCT,
    fast=(Fast("cuda", scaled_mm, minimum=(8, 9), plain=True),),
)
