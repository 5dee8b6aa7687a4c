"""Kernels over packed rows: one program a row, float32 inside, one rounding at the end.

Row numbers are 64-bit wherever they are multiplied: 110,592 rows of the feed-forward pass 2^31 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.ops.fp8_linear import E4M3, E4M3_MAX, SCALE_FLOOR
from plugins.ops.quantised_rows import Quantised

WARPS = 8
"""Warps of a program that holds a whole row of some thousands of channels in registers."""


@triton.jit
def _store_row(
    y, out, scales, row, columns, mask, width, QUANTISED: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr
):
    """A row as it is, or as E4M3 with its scale."""
    if QUANTISED:
        scale = tl.maximum(tl.max(tl.abs(tl.where(mask, y, 0.0)), 0) / LARGEST, FLOOR)
        tl.store(scales + row, scale)
        # One division a row: a product with the reciprocal is off by an ulp of float32, long before E4M3's rounding.
        y = tl.minimum(tl.maximum(y * tl.div_rn(1.0, scale), -LARGEST), LARGEST)
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _modulated(
    x, weight, scale, shift, index, out, scales, width, x_stride, scale_stride, shift_stride, eps,
    QUANTISED: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    slot = tl.load(index + row)
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value = value * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    factor = 1 + tl.load(scale + slot * scale_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = value * factor + tl.load(shift + slot * shift_stride + columns, mask=mask, other=0.0).to(tl.float32)
    _store_row(value, out, scales, row, columns, mask, width, QUANTISED, LARGEST, FLOOR)


@triton.jit
def _swiglu(
    gate, up, out, scales, width, gate_stride, up_stride,
    QUANTISED: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    opened = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(up + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = value * opened * tl.sigmoid(opened)
    _store_row(value, out, scales, row, columns, mask, width, QUANTISED, LARGEST, FLOOR)


@triton.jit
def _quantise(
    x, out, scales, width, x_stride,
    LARGEST: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    _store_row(value, out, scales, row, columns, mask, width, True, LARGEST, FLOOR)


@triton.jit
def _gated(x, update, gate, index, out, width, gate_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    opened = tl.load(gate + tl.load(index + row) * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    change = tl.load(update + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * width + columns, mask=mask, other=0.0).to(tl.float32) + opened * change
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=mask)


def modulated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, eps: float
) -> torch.Tensor:
    """As `plugins.ops.modulated_rms_norm.reference`; rows of x, scale and shift may lie apart."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_modulated(x, weight, scale, shift, index, eps, out, out, False)
    return out


def modulated_rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, eps: float
) -> Quantised:
    """The same, its rows quantised before they are ever rounded to x's dtype."""
    out, scales = _empty_quantised(x)
    _launch_modulated(x, weight, scale, shift, index, eps, out, scales, True)
    return out, scales


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `plugins.ops.swiglu.reference`."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch_swiglu(gate, up, out, out, False)
    return out


def swiglu_fp8(gate: torch.Tensor, up: torch.Tensor) -> Quantised:
    """The same, its rows quantised."""
    out, scales = _empty_quantised(gate)
    _launch_swiglu(gate, up, out, scales, True)
    return out, scales


def quantise_rows(x: torch.Tensor) -> Quantised:
    """As `plugins.ops.fp8_linear.quantise_rows`, of any dtype, for x [S, K]."""
    out, scales = _empty_quantised(x)
    block = triton.next_power_of_2(x.shape[1])
    _quantise[(len(x),)](
        x, out, scales, x.shape[1], x.stride(0), LARGEST=E4M3_MAX, FLOOR=SCALE_FLOOR, BLOCK=block, num_warps=WARPS
    )
    return out, scales


def gated_residual(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """As `plugins.ops.gated_residual.reference`; rows of the gate may lie apart."""
    x, update = x.contiguous(), update.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _gated[(len(x),)](x, update, gate, index, out, x.shape[1], gate.stride(0), BLOCK=block, num_warps=WARPS)
    return out


def _empty_quantised(x: torch.Tensor) -> Quantised:
    values = torch.empty(x.shape, dtype=E4M3, device=x.device)
    return values, torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


def _launch_modulated(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    index: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    scales: torch.Tensor,
    quantised: bool,
) -> None:
    rows, width = x.shape
    strides = x.stride(0), scale.stride(0), shift.stride(0)
    _modulated[(rows,)](
        x, weight, scale, shift, index, out, scales, width, *strides, eps,
        QUANTISED=quantised, LARGEST=E4M3_MAX, FLOOR=SCALE_FLOOR, BLOCK=triton.next_power_of_2(width), num_warps=WARPS,
    )  # fmt: skip


def _launch_swiglu(
    gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, quantised: bool
) -> None:
    rows, width = gate.shape
    _swiglu[(rows,)](
        gate, up, out, scales, width, gate.stride(0), up.stride(0),
        QUANTISED=quantised, LARGEST=E4M3_MAX, FLOOR=SCALE_FLOOR, BLOCK=triton.next_power_of_2(width), num_warps=WARPS,
    )  # fmt: skip
