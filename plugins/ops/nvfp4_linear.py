"""A linear layer of 4-bit floats (NVFP4): E2M1 values, an E4M3 scale for each 16 of them, a float32 scale above.

Source: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 3. The upper scale is one of the
whole weight, and one of each row of activations, so that a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import torch

from plugins.op import Op
from plugins.ops.fp8_linear import E4M3, E4M3_MAX, SCALE_FLOOR, scaled_rows

BLOCK = 16
"""Values that share an E4M3 scale, along the inner dimension."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by code; bit 3 of a code is the sign."""

E2M1_MAX = E2M1[-1]

E4M3_TINY = 2.0**-9
"""Smallest positive E4M3 value: the least scale of a block, so that a block of zeros gives zeros."""

TOP = E2M1_MAX * E4M3_MAX
"""The largest magnitude that two levels reach under an upper scale of one."""


def upper_scale(amax: torch.Tensor) -> torch.Tensor:
    """The scale above those of the blocks, for values of at most that magnitude."""
    return (amax / TOP).clamp_min(SCALE_FLOOR)


def quantise_blocks(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x = values * block_scale * scale`, the values being E2M1's.

    x [.., K] float32 or float64, `scale` broadcasts to it; returns values [.., K / 16, 16] in x's dtype and block_scale
    [.., K / 16] E4M3. Both are rounded to nearest even; values are rounded under their block's rounded scale.
    """
    blocks = (x / scale).unflatten(-1, (-1, BLOCK))
    block_scale = (blocks.abs().amax(-1) / E2M1_MAX).clamp(E4M3_TINY, E4M3_MAX).to(E4M3)
    return round_to_e2m1(blocks / block_scale.to(x.dtype).unsqueeze(-1)), block_scale


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 value, ties to an even code; what lies above 6 becomes 6."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    coarse = torch.where(magnitude < 4, torch.round(x), torch.round(x / 2) * 2)
    return torch.where(magnitude < 2, torch.round(x * 2) / 2, coarse)


def pack(values: torch.Tensor) -> torch.Tensor:
    """E2M1 values [.., K], K even, as codes of 4 bits: uint8 [.., K / 2], the first value of two in the low bits."""
    magnitude = values.abs()
    # One line for each of the distances 0.5, 1 and 2 between neighbours; the lowest is the code.
    codes = torch.minimum(torch.minimum(2 * magnitude, magnitude + 2), magnitude / 2 + 4).to(torch.uint8)
    codes |= torch.signbit(values).to(torch.uint8) << 3
    first, second = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return first | second << 4


def unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values [.., K] of codes uint8 [.., K / 2]."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=dtype, device=packed.device)
    return table[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()]


def reference(
    x: torch.Tensor, weight_packed: torch.Tensor, weight_block_scale: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """`x @ (weight * block_scale * scale)^T` of rows rounded to NVFP4.

    x [.., K], K a multiple of 16; weight_packed [N, K / 2] uint8, see `pack`; weight_block_scale [N, K / 16]
    float8_e4m3fn; weight_scale [1] float32; returns [.., N] in x's dtype. Values times block scales are exact in
    float32, where products are summed; the upper scales are applied to the sums, which are then rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = upper_scale(x.to(wide).abs().amax(-1, keepdim=True))
    rows = _scaled(*quantise_blocks(x.to(wide), scale))
    channels = _scaled(unpack(weight_packed, wide).unflatten(-1, (-1, BLOCK)), weight_block_scale)
    return (rows @ channels.T * scale * weight_scale.to(wide)).to(x.dtype)


def fake(
    x: torch.Tensor, weight_packed: torch.Tensor, weight_block_scale: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """Rows of x's dtype, as wide as the weight has channels."""
    return x.new_empty((*x.shape[:-1], weight_packed.shape[0]))


def _scaled(blocks: torch.Tensor, block_scale: torch.Tensor) -> torch.Tensor:
    return (blocks * block_scale.to(blocks.dtype).unsqueeze(-1)).flatten(-2)


_BLOCKS = """
    outer = Shape <end = -1> (x)
    by_block = Constant <value_ints = [-1, 16]> ()
    blocks_shape = Concat <axis = 0> (outer, by_block)
    blocks = Reshape (scaled_x, blocks_shape)
    block_magnitude = Abs (blocks)
    block_amax = ReduceMax <keepdims = 0> (block_magnitude, last)
    six = Constant <value_float = 6.0> ()
    fitting_scale = Div (block_amax, six)
    tiny = Constant <value_float = 0.001953125> ()
    block_scale = Max (fitting_scale, tiny)
    one = Constant <value = float {1.0}> ()
    block_scale_8 = QuantizeLinear <output_dtype = 17> (block_scale, one)
    rounded_scale = DequantizeLinear (block_scale_8, one)
    weight_scales = DequantizeLinear (weight_block_scale, one)
"""
"""The scales of x, in both bodies."""

_PRODUCT = """
    columns = Transpose <perm = [1, 0]> (channels)
    sums = MatMul (rows, columns)
    row_scaled = Mul (sums, row_scale)
    scaled = Mul (row_scaled, weight_scale)
    result = CastLike (scaled, x)
"""

# Neither ONNX Runtime nor the checker's shape inference knows the 4-bit type in arithmetic, and TensorRT no shifts:
# codes are split by division and looked up, and activations are rounded by their binade's step (0.5, 1 or 2).
BODY = (
    scaled_rows(TOP)
    + _BLOCKS
    + """
    minus_six = Constant <value_float = -6.0> ()
    column_of_scales = Unsqueeze (rounded_scale, last)
    unrounded = Div (blocks, column_of_scales)
    clipped = Clip (unrounded, minus_six, six)
    clipped_magnitude = Abs (clipped)
    two = Constant <value_float = 2.0> ()
    four = Constant <value_float = 4.0> ()
    half = Constant <value_float = 0.5> ()
    above_two = GreaterOrEqual (clipped_magnitude, two)
    above_four = GreaterOrEqual (clipped_magnitude, four)
    upper_step = Where (above_four, two, one)
    step = Where (above_two, upper_step, half)
    steps = Div (clipped, step)
    whole_steps = Round (steps)
    values = Mul (whole_steps, step)
    scaled_values = Mul (values, column_of_scales)
    x_shape = Shape (x)
    rows = Reshape (scaled_values, x_shape)

    bytes = Cast <to = 6> (weight_packed)
    sixteen = Constant <value = int32 {16}> ()
    high_codes = Div (bytes, sixteen)
    high_part = Mul (high_codes, sixteen)
    low_codes = Sub (bytes, high_part)
    table = Constant <value = float[16] {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6}> ()
    low = Gather (table, low_codes)
    high = Gather (table, high_codes)
    low_column = Unsqueeze (low, last)
    high_column = Unsqueeze (high, last)
    pairs = Concat <axis = 2> (low_column, high_column)
    weight_blocks_shape = Constant <value_ints = [0, -1, 16]> ()
    weight_blocks = Reshape (pairs, weight_blocks_shape)
    weight_scales_column = Unsqueeze (weight_scales, last)
    scaled_weight = Mul (weight_blocks, weight_scales_column)
    flat = Constant <value_ints = [0, -1]> ()
    channels = Reshape (scaled_weight, flat)
"""
    + _PRODUCT
)

NATIVE_BODY = (
    scaled_rows(TOP)
    + _BLOCKS
    + """
    quantised_x = QuantizeLinear <axis = -1, block_size = 16, output_dtype = 23> (scaled_x, rounded_scale)
    rows = DequantizeLinear <axis = -1, block_size = 16> (quantised_x, rounded_scale)
    channels = DequantizeLinear <axis = 1, block_size = 16> (weight_packed, weight_scales)
"""
    + _PRODUCT
)
"""The same where `weight_packed` is FLOAT4E2M1 [N, K], which has the same bytes: TensorRT makes it one product of 4-bit
operands."""

OP = Op("nvfp4_linear", reference, fake, BODY)
