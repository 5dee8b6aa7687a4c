"""Kernels of row-local work against float64 on a real GPU. Needs torch with its Triton, and pytest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from plugins.ops import fp8_linear, gated_residual, modulated_rms_norm, norm_rotary, swiglu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")

HIDDEN, FFN, HEADS, HEAD, HALF = 5376, 14336, 56, 128, 48
EPS = 1e-5

# One rounding of a value to 8 bits of mantissa (bfloat16), and float32 inside.
ONCE = {torch.bfloat16: 2**-8, torch.float32: 2e-6}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(11)


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def modulation(generator: torch.Generator, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    shift, scale, gate = draw(generator, 12, 6 * HIDDEN, dtype=dtype).chunk(6, -1)[:3]
    return shift, scale, gate, torch.randint(12, (rows,), device="cuda", generator=generator)


def close(found: torch.Tensor, exact: torch.Tensor, share: float) -> bool:
    """Each value within its own rounding, and what float32 adds to the largest."""
    bound = exact.abs() * share + 1e-5 * exact.abs().max()
    return bool(((found.double() - exact).abs() <= bound).all())


def wide(*arguments: object) -> list[object]:
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_and_rotation_of_a_packed_projection(generator: torch.Generator, dtype: torch.dtype) -> None:
    packed = draw(generator, 301, HEADS, 3 * HEAD, dtype=dtype)
    angles = draw(generator, 301, HALF, dtype=torch.float32)
    for part in packed.chunk(3, -1)[:2]:
        # Rounded as the op rounds them, and kept in float32, as engines are given them.
        rounded = (x.to(dtype).float() for x in (angles.cos(), angles.sin()))
        arguments = part, draw(generator, HEAD, dtype=dtype), *rounded
        exact = norm_rotary.reference(*wide(*arguments), EPS, 2 * HALF)  # type: ignore[arg-type]
        found = norm_rotary.OP(*arguments, EPS, 2 * HALF)
        assert found.is_contiguous()
        assert close(found, exact, ONCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_modulated_norm_and_gated_residual(generator: torch.Generator, dtype: torch.dtype) -> None:
    from plugins.kernels import rows

    shift, scale, gate, index = modulation(generator, 77, dtype)
    hidden, update, weight = (draw(generator, *shape, dtype=dtype) for shape in ((77, HIDDEN), (77, HIDDEN), (HIDDEN,)))
    exact = modulated_rms_norm.reference(*wide(hidden, weight, scale, shift, index), EPS)  # type: ignore[arg-type]
    assert close(rows.modulated_rms_norm(hidden, weight, scale, shift, index, EPS), exact, ONCE[dtype])
    exact = gated_residual.reference(*wide(hidden, update, gate, index))  # type: ignore[arg-type]
    assert close(rows.gated_residual(hidden, update, gate, index), exact, ONCE[dtype])


def test_swiglu_of_halves(generator: torch.Generator) -> None:
    from plugins.kernels import rows

    gate, up = draw(generator, 77, 2 * FFN).chunk(2, -1)
    exact = swiglu.reference(gate.double(), up.double())
    assert close(rows.swiglu(gate, up), exact, ONCE[torch.bfloat16])


def test_rows_are_quantised_as_the_reference_does(generator: torch.Generator) -> None:
    from plugins.kernels import rows

    shift, scale, _, index = modulation(generator, 77, torch.bfloat16)
    norm = draw(generator, 77, HIDDEN), draw(generator, HIDDEN), scale, shift, index, EPS
    halves = draw(generator, 77, 2 * FFN).chunk(2, -1)
    mixed = draw(generator, 77, HEADS * HEAD)
    cases: list[tuple[Callable[[], tuple[torch.Tensor, torch.Tensor]], torch.Tensor]] = [
        (lambda: rows.modulated_rms_norm_fp8(*norm), modulated_rms_norm.reference(*wide(*norm))),  # type: ignore[arg-type]
        (lambda: rows.swiglu_fp8(*halves), swiglu.reference(*(half.double() for half in halves))),
        (lambda: rows.quantise_rows(mixed), mixed.double()),
    ]
    for run, exact in cases:
        values, scales = run()
        expected, expected_scales = fp8_linear.quantise_rows(exact)
        assert torch.allclose(scales.double(), expected_scales, rtol=1e-5)
        # Float32 against float64 puts one value in some ten thousand on the other side of a rounding border.
        assert (values.float() != expected.float()).double().mean() < 1e-3


def test_more_than_two_to_the_31_elements_are_reached(generator: torch.Generator) -> None:
    """110,592 rows of the feed-forward: the last rows lie beyond 32-bit offsets."""
    from plugins.kernels import rows

    packed = torch.empty(110_592, 2 * FFN, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    gate, up = packed.chunk(2, -1)
    found = rows.swiglu(gate, up)
    exact = swiglu.reference(gate[-64:].double(), up[-64:].double())
    assert close(found[-64:], exact, ONCE[torch.bfloat16])
