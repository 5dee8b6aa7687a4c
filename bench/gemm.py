"""The block's matrix products: bfloat16, and 8-bit floats with a scale a row and a channel, by way of summing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench import host
from bench.measuring import in_turns
from bench.synthetic import DEVICE, WEIGHT_DEVIATION
from plugins.dimensions import DenoiserDimensions
from plugins.ops.fp8_linear import quantise_rows

CHECKED_ROWS = 256
"""Rows whose products are compared with float64's."""


def shapes(size: DenoiserDimensions) -> dict[str, tuple[int, int]]:
    """Output and input features of each product of a block."""
    return {
        "qkv": (3 * size.inner, size.hidden),
        "out": (size.hidden, size.inner),
        "gate and up": (2 * size.ffn, size.hidden),
        "down": (size.hidden, size.ffn),
    }


def measure(size: DenoiserDimensions, rows: int) -> dict[str, Any]:
    """TFLOP/s of each product, and the error of the 8-bit ones beyond their operands' rounding."""
    products = {name: _product(rows, *shape) for name, shape in shapes(size).items()}
    return {"what": "matrix products of a block", "host": host.describe(), "rows": rows, "products": products}


def _product(rows: int, outputs: int, inputs: int) -> dict[str, Any]:
    generator = torch.Generator(DEVICE).manual_seed(outputs)
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=DEVICE, generator=generator)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE, generator=generator) * WEIGHT_DEVIATION
    values, scale = _quantised(x)
    channels, channel_scale = quantise_rows(weight.float())

    def scaled(fast: bool) -> Callable[[], torch.Tensor]:
        return lambda: torch._scaled_mm(
            values, channels.T, scale, channel_scale.T, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    sides: dict[str, Callable[[], torch.Tensor]] = {
        "bfloat16": lambda: x @ weight.T,
        "fp8, sums in float32": scaled(False),
        "fp8, sums in the tensor cores": scaled(True),
    }
    timings = in_turns(sides)
    exact = _exact(values, scale, channels, channel_scale)
    true = x[:CHECKED_ROWS].double() @ weight.double().T
    found: dict[str, Any] = {"operations": 2.0 * rows * outputs * inputs}
    for name, run in sides.items():
        result = run()[:CHECKED_ROWS].double()
        found[name] = {
            **timings[name].as_json(),
            "tflops": found["operations"] / timings[name].median / 1e9,
            "error": _error(result, true),
            "error_of_sums": _error(result, true if name == "bfloat16" else exact),
        }
    return found


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By chunks: the float32 rows are twice as large as the bfloat16 ones."""
    values, scales = zip(*(quantise_rows(part.float()) for part in x.split(8192)), strict=True)
    return torch.cat(values), torch.cat(scales)


def _exact(
    values: torch.Tensor, scale: torch.Tensor, channels: torch.Tensor, channel_scale: torch.Tensor
) -> torch.Tensor:
    """The product of the rounded operands, in float64."""
    rows = values[:CHECKED_ROWS].double() * scale[:CHECKED_ROWS].double()
    return rows @ (channels.double() * channel_scale.double()).T


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
