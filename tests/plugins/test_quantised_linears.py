"""The quantised linear layers: rounding as ml_dtypes rounds, products as float64 gives them, errors as theory says."""

from __future__ import annotations

import tomllib
from math import log, sqrt
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from packaging.requirements import Requirement
from torch._subclasses.fake_tensor import FakeTensorMode

from export.compare import ort_value
from export.passes.name_tensors import onnx_dtype
from plugins.op import DOMAIN, DOMAIN_VERSION, ONNX_OPSET, Op
from plugins.ops import fp8_linear, nvfp4_linear

FEW = settings(max_examples=25, deadline=None)


def required_onnxruntime() -> Requirement:
    """What a build host must have."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    found = map(Requirement, project["optional-dependencies"]["export"])
    return next(requirement for requirement in found if requirement.name == "onnxruntime")


NEEDS_ONNXRUNTIME = pytest.mark.skipif(
    onnxruntime.__version__ not in required_onnxruntime().specifier,
    reason=f"needs {required_onnxruntime()}; {onnxruntime.__version__} is installed",
)
Arguments = tuple[torch.Tensor, ...]
Doubles = NDArray[np.float64]


@st.composite
def matrices(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [M, K] and a weight [N, K] of many magnitudes, with outliers and rows of zeros."""
    rows, channels, inner = draw(st.integers(1, 9)), draw(st.integers(1, 40)), 16 * draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    pair = []
    for count in (rows, channels):
        x = torch.randn(count, inner, generator=generator) * draw(st.sampled_from([1e-20, 1e-3, 1.0, 3e4]))
        if draw(st.booleans()):
            x[draw(st.integers(0, count - 1)), draw(st.integers(0, inner - 1))] *= 1000
        if draw(st.booleans()):
            x[draw(st.integers(0, count - 1))] = 0
        pair.append(x)
    return pair[0], pair[1]


def fp8_arguments(x: torch.Tensor, weight: torch.Tensor) -> Arguments:
    values, scale = fp8_linear.quantise_rows(weight)
    return x, values, scale.squeeze(-1)


def nvfp4_arguments(x: torch.Tensor, weight: torch.Tensor) -> Arguments:
    scale = nvfp4_linear.upper_scale(weight.abs().amax().reshape(1))
    values, block_scale = nvfp4_linear.quantise_blocks(weight, scale)
    return x, nvfp4_linear.pack(values.flatten(-2)), block_scale, scale


ARGUMENTS = {fp8_linear.OP: fp8_arguments, nvfp4_linear.OP: nvfp4_arguments}
OPS = pytest.mark.parametrize("op", ARGUMENTS, ids=lambda op: op.name)


def to_e4m3(x: Doubles) -> Doubles:
    # Torch rounds a float64 to float32 on its way, which can put it on the middle of two E4M3 values.
    clipped = np.clip(x, -448, 448).astype(np.float32)
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def fp8_formula(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> tuple[Doubles, Doubles]:
    """The product in float64, and the sum of its terms' magnitudes."""
    rows = x.double().numpy()
    scale = np.maximum(np.abs(rows).max(1, keepdims=True) / 448, 1e-30)
    return _product(to_e4m3(rows / scale) * scale, weight.double().numpy() * weight_scale.double().numpy()[:, None])


def nvfp4_formula(
    x: torch.Tensor, packed: torch.Tensor, block_scale: torch.Tensor, scale: torch.Tensor
) -> tuple[Doubles, Doubles]:
    rows = x.double().numpy()
    upper = np.maximum(np.abs(rows).max(1, keepdims=True) / (6 * 448), 1e-30)
    blocks = (rows / upper).reshape(len(rows), -1, 16)
    scales = to_e4m3(np.maximum(np.abs(blocks).max(2, keepdims=True) / 6, 2.0**-9))
    values = (blocks / scales).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    weight = _unpacked(packed).reshape(len(packed), -1, 16) * block_scale.double().numpy()[..., None]
    return _product((values * scales).reshape(rows.shape) * upper, weight.reshape(len(packed), -1) * float(scale))


FORMULAS = {fp8_linear.OP: fp8_formula, nvfp4_linear.OP: nvfp4_formula}


def _product(rows: Doubles, channels: Doubles) -> tuple[Doubles, Doubles]:
    return rows @ channels.T, np.abs(rows) @ np.abs(channels).T


def _unpacked(packed: torch.Tensor) -> Doubles:
    """As onnx reads its 4-bit type, two values a byte."""
    dims = [packed.shape[0], 2 * packed.shape[1]]
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT4E2M1, dims=dims, raw_data=packed.numpy().tobytes())
    return onnx.numpy_helper.to_array(tensor).astype(np.float64)


def assert_close(found: torch.Tensor, expected: tuple[Doubles, Doubles], unit: float) -> None:
    """Within some units of the sum of the terms' magnitudes, which bounds what any order of summation can differ by."""
    value, magnitude = expected
    assert np.all(np.abs(found.double().numpy() - value) <= unit * magnitude + 1e-300)


@OPS
@FEW
@given(pair=matrices())
def test_reference_in_float64_is_the_formula(op: Op, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, *weight = ARGUMENTS[op](*pair)
    # 128 terms and two scales in float64, each to 1.1e-16.
    assert_close(op(x.double(), *weight), FORMULAS[op](x.double(), *weight), 2e-14)


@NEEDS_ONNXRUNTIME
@OPS
@FEW
@given(pair=matrices())
def test_onnx_function_in_onnxruntime_is_the_reference(op: Op, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    arguments = ARGUMENTS[op](*pair)
    expected = op(*arguments)
    # Quantised values are the same bits on both sides; at most 128 of their products are summed, each sum to 6e-8.
    _, magnitude = FORMULAS[op](*arguments)
    assert_close(run_function(op, arguments), (expected.double().numpy(), magnitude), 128 * 6e-8)


@OPS
@FEW
@given(pair=matrices())
def test_rows_do_not_depend_on_one_another(op: Op, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, *weight = ARGUMENTS[op](*pair)
    whole, last = op(x, *weight)[-1], op(x[-1:], *weight)[0]
    # A product of one row may be summed in another order.
    _, magnitude = FORMULAS[op](x[-1:], *weight)
    assert_close(last[None], (whole[None].double().numpy(), magnitude), 128 * 6e-8)


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_and_channels_of_zeros_give_zeros(op: Op, dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 32), torch.randn(8, 32)
    x[1], weight[3] = 0, 0
    found = op(*ARGUMENTS[op](x.to(dtype), weight))
    assert found.dtype == dtype
    assert found.isfinite().all()
    assert not found[1].any()
    assert not found[:, 3].any()
    assert found[0, :3].any()


@OPS
def test_bfloat16_rows_are_rounded_once_at_the_end(op: Op) -> None:
    x, *weight = ARGUMENTS[op](torch.randn(5, 64).bfloat16(), torch.randn(24, 64))
    assert torch.equal(op(x, *weight), op(x.float(), *weight).bfloat16())


@OPS
@FEW
@given(pair=matrices(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_fake_has_the_shape_and_dtype_of_the_result(
    op: Op, pair: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    x, *weight = ARGUMENTS[op](*pair)
    arguments = (x.to(dtype).unsqueeze(0), *weight)
    real = op(*arguments)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) for a in arguments))
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_values_are_e4m3_to_nearest_even_and_saturated() -> None:
    # 448 / 16 = 28 and its half are between neighbours that are 2 and 1 apart: ties on either side of an even code.
    row = torch.tensor([[448.0, 25.0, 27.0, 29.0, 12.5, 13.5, 2.0**-10, 1.5 * 2**-9, -31.0]])
    values, scale = fp8_linear.quantise_rows(row)
    assert scale.item() == 1
    assert values.float().tolist() == [[448, 24, 28, 28, 12, 14, 0, 2**-8, -32]]
    assert fp8_linear.quantise_rows(torch.tensor([[3.3e38, -3.4e38]]))[0].float().isfinite().all()


def test_every_code_of_e2m1_is_packed_and_read_as_onnx_packs_it() -> None:
    values = torch.tensor([[*nvfp4_linear.E2M1, *(-v for v in nvfp4_linear.E2M1)]])
    packed = nvfp4_linear.pack(values)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(nvfp4_linear.unpack(packed, torch.float32), values)
    np.testing.assert_array_equal(_unpacked(packed), values.numpy())


def test_e2m1_is_rounded_as_ml_dtypes_rounds() -> None:
    grid = torch.arange(-800, 801) / 100
    expected = grid.numpy().clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(nvfp4_linear.round_to_e2m1(grid).numpy(), expected)


def test_fp8_errs_as_two_roundings_to_three_bits_do() -> None:
    x, weight = torch.randn(64, 2048), torch.randn(256, 2048)
    # A value 1.m is rounded by up to 2^-4, evenly spread: 2^-3 / sqrt(12) in the mean square, over 1.m, whose mean
    # 1 / square is 3 / (8 ln 2) where magnitudes are spread evenly over a binade's logarithm. Both factors of every
    # product err so, independently, and sums of K terms keep the share.
    one = 2**-3 / sqrt(12) * sqrt(3 / (8 * log(2)))
    assert relative_error(fp8_linear.OP, x, weight) == pytest.approx(sqrt(2) * one, rel=0.1)


def test_nvfp4_errs_as_two_roundings_to_one_bit_do() -> None:
    x, weight = torch.randn(64, 2048), torch.randn(256, 2048)
    # The largest of 16 normal magnitudes is 2.1 on average and becomes 6, so that one standard deviation is 6 / 2.1.
    # Rounding errs by d / sqrt(12) in the mean square where neighbours are d apart; the largest itself, and the scale's
    # own rounding, move this by a tenth.
    sigma = 6 / 2.1
    normal = torch.distributions.Normal(0.0, sigma)
    below = [2 * normal.cdf(torch.tensor(edge)).item() - 1 for edge in (0.0, 2.0, 4.0, 6.0)]
    square = sum(d**2 / 12 * (below[i + 1] - below[i]) for i, d in enumerate((0.5, 1, 2)))
    assert relative_error(nvfp4_linear.OP, x, weight) == pytest.approx(sqrt(2 * square) / sigma, rel=0.15)


def relative_error(op: Op, x: torch.Tensor, weight: torch.Tensor) -> float:
    exact = x.double() @ weight.double().T
    return ((op(*ARGUMENTS[op](x, weight)).double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), fp8_linear.reference), ((8, 9), fp8_linear.scaled_mm), ((12, 0), fp8_linear.scaled_mm)],
)
def test_tensor_cores_are_used_from_ada_on(capability: tuple[int, int], expected: object) -> None:
    assert fp8_linear.OP.implementation("cuda", capability) is expected


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(33, 64, 48), (1, 16, 16), (5, 40, 24), (0, 32, 16)])
def test_scaled_product_is_the_formula(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """The implementation for GPUs; torch's operator runs on CPUs as well. [5, 40, 24] goes the reference's way."""
    rows, inner, channels = shape
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(1, rows, inner, generator=generator).to(dtype)
    _, weight, weight_scale = fp8_arguments(x, torch.randn(channels, inner, generator=generator))
    if device == "cpu" and dtype == torch.bfloat16 and (missing := row_scales_missing()):
        pytest.skip(f"torch {torch.__version__} has no scales by row on this CPU: {missing}")
    found = fp8_linear.scaled_mm(*(a.to(device) for a in (x, weight, weight_scale))).cpu()
    assert (found.shape, found.dtype) == ((1, rows, channels), dtype)
    # bfloat16 results are rounded to 8 bits; 64 products are added in float32, or with 14 bits by a GPU's units.
    unit = 2**-8 if dtype == torch.bfloat16 else {"cpu": 64 * 6e-8, "cuda": 2**-12}[device]
    if rows:
        values, scale = fp8_linear.quantise_rows(x[0].float())
        dequantised = (values.double() * scale).numpy(), (weight.double() * weight_scale[:, None]).numpy()
        assert_close(found[0], _product(*dequantised), unit)


def row_scales_missing() -> str:
    """What torch's product of 8-bit floats says of scales by row on this CPU: nothing where it takes them.

    Which implementation a CPU gets is a matter of torch's release and of the CPU; torch 2.11 has one that takes two
    numbers only.
    """
    values = torch.ones(16, 16).to(fp8_linear.E4M3)
    try:
        torch._scaled_mm(values, values.T, torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def run_function(op: Op, arguments: Arguments) -> torch.Tensor:
    model = one_node(op, arguments).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    feed = {name: ort_value(tensor) for name, tensor in zip(op.inputs, arguments, strict=True)}
    return torch.from_numpy(session.run_with_ort_values(None, feed)[0].numpy())


def one_node(op: Op, arguments: Arguments) -> onnx.ModelProto:
    helper, kind = onnx.helper, onnx_dtype(arguments[0].dtype).value
    inputs = [
        helper.make_tensor_value_info(name, onnx_dtype(tensor.dtype).value, tensor.shape)
        for name, tensor in zip(op.inputs, arguments, strict=True)
    ]
    output = helper.make_tensor_value_info("result", kind, ["rows", "channels"])
    model = helper.make_model(
        helper.make_graph([helper.make_node(op.name, op.inputs, ["result"], domain=DOMAIN)], "one", inputs, [output]),
        functions=[op.function()],
        opset_imports=[helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    return model
