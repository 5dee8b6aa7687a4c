"""Hopper's attention kernels on a Hopper GPU: against float64 references, with padding, and past 2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plugins.kernels.cuda_module import CudaError, compile_cubin
from plugins.kernels.hopper_attention import BFLOAT16, SAGE, Variant, attend, serves
from plugins.ops import attention, dense_attention, sage_attention, skip_softmax_attention

SCALE = 128**-0.5
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def heads(rows: int, count: int, valid: int, mean: float = 0.0, far: int = 0, device: str = "cuda") -> Heads:
    """Rows first in memory, NaN in the padding; the last `far` rows' keys score 26 below the others for all queries."""
    generator = torch.Generator(device).manual_seed(rows)
    q, k, v = (torch.randn(rows, count, 128, device=device, generator=generator) for _ in range(3))
    k += mean * torch.randn(1, count, 128, device=device, generator=generator)
    if far:
        q[..., 0], k[..., 0] = 10, 0
        k[rows - far :, :, 0] = -30
    for x in (q, k, v):
        x[valid:] = float("nan")
    return tuple(x.bfloat16().transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # type: ignore[return-value]


def relative(found: torch.Tensor, expected: torch.Tensor, valid: int) -> float:
    found, expected = (x[:, :, :valid].double() for x in (found, expected))
    return float((found - expected).norm() / expected.norm())


SIZES = [(1000, 3, 1000), (1000, 3, 777), (100, 2, 100), (257, 1, 1), (5000, 2, 4999)]


@ON_HOPPER
@pytest.mark.parametrize(("rows", "count", "valid"), SIZES)
def test_bfloat16_kernel_is_dense_attention(rows: int, count: int, valid: int) -> None:
    x, valid_rows = heads(rows, count, valid), torch.tensor([valid], device="cuda")
    found = dense_attention.hopper(*x, valid_rows, SCALE)
    exact = dense_attention.reference(*(t.double() for t in x), valid_rows, SCALE)
    # Weights and results are rounded to 8 bits: 2^-9 / sqrt(3) of themselves each, in the mean square, is 0.0011.
    assert relative(found, exact, valid) < 0.003
    assert torch.all(found[:, :, valid:] == 0)
    assert found.stride() == torch.empty_like(x[0]).stride()


@ON_HOPPER
@pytest.mark.parametrize(("rows", "count", "valid"), SIZES)
@pytest.mark.parametrize("mean", [0.0, 8.0])
def test_sage_kernel_errs_as_its_reference_does(rows: int, count: int, valid: int, mean: float) -> None:
    x, valid_rows = heads(rows, count, valid, mean), torch.tensor([valid], device="cuda")
    sizes = (1, SAGE.keys, 64, SAGE.keys)
    arguments = (valid_rows, torch.zeros(1, device="cuda"), SCALE, *sizes)
    found, _ = attend(SAGE, *x, *arguments[:3])
    wide = tuple(t.double() for t in x)
    expected, _ = sage_attention.reference(*wide, *arguments)
    exact = dense_attention.reference(*wide, valid_rows, SCALE)
    if rows >= SAGE.keys:
        # Weights are rounded relative to the running maximum here, to the row's there: neither is nearer the truth.
        assert relative(found, exact, valid) < 1.1 * relative(expected, exact, valid) + 1e-3
    assert relative(found, exact, valid) < 0.08
    assert torch.all(found[:, :, valid:] == 0)


@ON_HOPPER
@pytest.mark.parametrize(("rows", "valid", "threshold"), [(2000, 2000, 1e-4), (2000, 1900, 1e-2), (3000, 3000, 0.0)])
def test_tiles_are_skipped_as_in_the_reference(rows: int, valid: int, threshold: float) -> None:
    x, valid_rows = heads(rows, 2, valid, far=rows // 2), torch.tensor([valid], device="cuda")
    at = torch.tensor([threshold], device="cuda")
    arguments = (*(t.double() for t in x), valid_rows, at, SCALE)
    expected = {
        BFLOAT16: skip_softmax_attention.reference(*arguments, 64, BFLOAT16.keys),
        SAGE: sage_attention.reference(*arguments, 1, SAGE.keys, 64, SAGE.keys),
    }
    for variant, (result, counts) in expected.items():
        found, skipped = attend(variant, *x, valid_rows, at, SCALE)
        assert torch.equal(skipped, counts)
        assert bool(skipped.min() > 0) == (threshold > 0)
        # Both round weights to E4M3, each relative to another maximum: two roundings of 2.6% apart at most.
        assert relative(found, result, valid) < (0.05 if variant is SAGE else 0.003)


@ON_HOPPER
@pytest.mark.parametrize("variant", [SAGE, BFLOAT16], ids=["sage", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_runs_of_tiles_are_skipped_where_all_warps_agree(variant: Variant, seed: int) -> None:
    """Tiles that most rows would skip come in runs of any length; some warps' 16 rows would skip none of them."""
    rows, count, valid = 6000, 3, 5900
    generator = torch.Generator("cuda").manual_seed(seed)

    def picked(of_rows: int, share: float) -> torch.Tensor:
        """Whether each row is of a group that was drawn, for each head."""
        groups = torch.rand(-(-rows // of_rows), count, device="cuda", generator=generator) < share
        return groups.repeat_interleave(of_rows, 0)[:rows]

    q, k, v = (torch.randn(rows, count, 128, device="cuda", generator=generator) for _ in range(3))
    q[..., 0] = torch.where(picked(16, 0.05), 0.0, 10.0)
    k[..., 0] = torch.where(picked(variant.keys, (0.1, 0.4, 0.7, 0.85)[seed]), -30.0, 0.0)
    x = tuple(t.bfloat16().transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    valid_rows, at = torch.tensor([valid], device="cuda"), torch.tensor([1e-4], device="cuda")
    arguments = (*(t.double() for t in x), valid_rows, at, SCALE)
    if variant is SAGE:
        expected, counts = sage_attention.reference(*arguments, 1, variant.keys, 64, variant.keys)
    else:
        expected, counts = skip_softmax_attention.reference(*arguments, 64, variant.keys)
    found, skipped = attend(variant, x[0], x[1], x[2], valid_rows, at, SCALE)
    assert torch.equal(skipped, counts)
    assert skipped.sum() > 0
    assert relative(found, expected, valid) < (0.05 if variant is SAGE else 0.003)


@ON_HOPPER
def test_rows_past_two_to_the_31_bytes_and_elements_are_addressed() -> None:
    rows = 160_000
    x = tuple(torch.randn(rows, 112, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    views = tuple(t.transpose(0, 1)[-2:].unsqueeze(0) for t in x)
    valid_rows, dense = torch.tensor([rows], device="cuda"), torch.zeros(1, device="cuda")
    last = slice(rows - 64, rows)
    wide = tuple(t.double() for t in views)
    exact = (wide[0][:, :, last] @ wide[1].mT * SCALE).softmax(-1) @ wide[2]
    for variant, bound in ((BFLOAT16, 0.003), (SAGE, 0.1)):
        found, _ = attend(variant, *views, valid_rows, dense, SCALE)
        assert relative(found[:, :, last], exact, 64) < bound


@ON_HOPPER
def test_several_batches_and_strides() -> None:
    x = torch.randn(2, 3, 300, 3 * 128, device="cuda", dtype=torch.bfloat16).chunk(3, dim=-1)
    rows = torch.tensor([300], device="cuda")
    found = dense_attention.hopper(*x, rows, SCALE)
    assert relative(found, dense_attention.reference(*(t.double() for t in x), rows, SCALE), 300) < 0.003
    whole = attention.hopper(*x, SCALE, 0)
    assert relative(whole, attention.reference(*(t.double() for t in x), SCALE, 0), 300) < 0.003


def test_kernels_serve_what_they_can_read() -> None:
    x = heads(32, 2, 32, device="cpu")
    assert serves(*x)
    assert not serves(*(t.float() for t in x))
    assert not serves(*(t[..., :64] for t in x))
    assert not serves(x[0], x[1][:, :, :16], x[2][:, :, :16])
    assert not serves(x[0], torch.randn(1, 2, 32, 132).bfloat16()[..., 4:], x[2])


@pytest.mark.parametrize("variant", [SAGE, BFLOAT16], ids=["sage", "bfloat16"])
def test_kernels_fit_a_multiprocessor(variant: object) -> None:
    # 227 KiB of shared memory are the most that a block of Hopper's may have.
    assert getattr(variant, "shared_bytes") <= 227 * 1024  # noqa: B009


@ON_HOPPER
def test_what_does_not_compile_is_quoted() -> None:
    with pytest.raises(CudaError, match='identifier "nothing" is undefined'):
        compile_cubin("__global__ void f() { nothing(); }", "sm_90a")


@pytest.mark.filterwarnings("ignore:SAGE attention over less")
def test_sage_over_less_than_a_tile_skips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bfloat16 kernel that serves such rows has smaller tiles, the last of which is negligible here."""
    x, valid_rows, at = heads(200, 2, 200, far=72, device="cpu"), torch.tensor([200]), torch.tensor([1e-2])
    sizes = (1, SAGE.keys, 64, SAGE.keys)

    def emulated(variant: Variant, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return skip_softmax_attention.reference(*arguments, 64, variant.keys)

    monkeypatch.setattr(sage_attention, "attend", emulated)
    found, skipped = sage_attention.hopper(*x, valid_rows, at, SCALE, *sizes)
    expected, none = sage_attention.reference(*x, valid_rows, at, SCALE, *sizes)
    assert torch.equal(skipped, none)
    assert torch.equal(found, expected)
