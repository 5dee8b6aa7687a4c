"""Work between a block's products: kernels of our own beside what torch.compile fuses by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench import host
from bench.measuring import in_turns
from bench.synthetic import DEVICE
from plugins.dimensions import MODALITIES, TIMESTEP_SLOTS, DenoiserDimensions
from plugins.kernels import rows as kernels
from plugins.ops import fp8_linear, gated_residual, modulated_rms_norm, norm_rotary, swiglu

Side = Callable[[], Any]

EPS = 1e-5


def measure(size: DenoiserDimensions, rows: int) -> dict[str, Any]:
    """Milliseconds and GB/s of each op on both sides. Bytes are of each input and result once."""
    found = {}
    for name, (nbytes, sides) in _cases(size, rows).items():
        timings = in_turns(sides)
        found[name] = {
            side: {**timing.as_json(), "gbps": nbytes / timing.median / 1e6} for side, timing in timings.items()
        }
        torch.cuda.empty_cache()
    return {"what": "row-local work of a block", "host": host.describe(), "rows": rows, "ops": found}


def _cases(size: DenoiserDimensions, rows: int) -> dict[str, tuple[float, dict[str, Side]]]:
    generator = torch.Generator(DEVICE).manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)

    table = draw(MODALITIES * TIMESTEP_SLOTS, 6 * size.hidden)
    shift, scale, gate = table.chunk(6, -1)[:3]
    index = torch.randint(len(table), (rows,), device=DEVICE, generator=generator)
    hidden, update, weight = draw(rows, size.hidden), draw(rows, size.hidden), draw(size.hidden)
    packed = draw(rows, 3 * size.inner).unflatten(-1, (size.heads, -1))
    query, norm = packed[..., : size.head_dim], draw(size.head_dim)
    angles = torch.randn(rows, 3 * size.rope_frequencies, device=DEVICE, generator=generator)
    rotary = query, norm, angles.cos(), angles.sin(), EPS, 2 * angles.shape[1]
    halves = draw(rows, 2 * size.ffn).chunk(2, -1)
    modulated = hidden, weight, scale, shift, index, EPS
    mixed = draw(rows, size.inner)
    narrow, wide, inner = 2.0 * rows * size.hidden, 2.0 * rows * size.ffn, 2.0 * rows * size.inner
    return {
        "modulated norm": (2 * narrow, _sides(kernels.modulated_rms_norm, modulated_rms_norm.reference, modulated)),
        "modulated norm to fp8": (
            1.5 * narrow,
            _sides(kernels.modulated_rms_norm_fp8, _then_quantised(modulated_rms_norm.reference), modulated),
        ),
        "norm and rotation": (2 * inner, _sides(norm_rotary.kernel, norm_rotary.reference, rotary)),
        "gated residual": (
            3 * narrow,
            _sides(kernels.gated_residual, gated_residual.reference, (hidden, update, gate, index)),
        ),
        "swiglu": (3 * wide, _sides(kernels.swiglu, swiglu.reference, halves)),
        "swiglu to fp8": (2.5 * wide, _sides(kernels.swiglu_fp8, _then_quantised(swiglu.reference), halves)),
        "mixed values to fp8": (1.5 * inner, _sides(kernels.quantise_rows, _then_quantised(_same), (mixed,))),
    }


def _sides(kernel: Callable[..., Any], reference: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Side]:
    fused = torch.compile(reference, dynamic=False)
    return {"kernel": lambda: kernel(*arguments), "torch.compile": lambda: fused(*arguments)}


def _then_quantised(reference: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda *arguments: fp8_linear.quantise_rows(reference(*arguments).float())


def _same(x: torch.Tensor) -> torch.Tensor:
    return x
