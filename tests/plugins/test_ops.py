"""Each operation says the same in plain torch, as a fake, as an ONNX function and in a float64 formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from plugins.op import DOMAIN, DOMAIN_VERSION, ONNX_OPSET, Op
from plugins.ops.attention import OP as ATTENTION
from plugins.ops.frame_norm import OP as FRAME_NORM
from plugins.ops.gated_residual import OP as GATED_RESIDUAL
from plugins.ops.modulated_rms_norm import OP as MODULATED_RMS_NORM
from plugins.ops.norm_rotary import OP as NORM_ROTARY
from plugins.ops.snake import OP as SNAKE
from plugins.ops.swiglu import OP as SWIGLU
from plugins.registry import REGISTRY, find

FEW = settings(max_examples=25, deadline=None)
ONNX_TYPES = {torch.float32: 1, torch.int64: 7, torch.bfloat16: 16}


@dataclass(frozen=True)
class Case:
    op: Op
    arguments: tuple

    def to(self, dtype: torch.dtype) -> Case:
        """The same case with its floating point tensors in another dtype."""
        return Case(self.op, tuple(x.to(dtype) if _is_float(x) else x for x in self.arguments))

    def formula(self) -> np.ndarray:
        return FORMULAS[self.op.name](*(x.double().numpy() if _is_float(x) else x for x in self.arguments))


def _is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, _: int) -> np.ndarray:
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), v)


def _modulated(x, weight, scale, shift, index, eps) -> np.ndarray:
    normed = x / np.sqrt((x * x).sum(1, keepdims=True) / x.shape[1] + eps) * weight
    return np.stack([normed[i] * (1 + scale[r]) + shift[r] for i, r in enumerate(index.tolist())])


def _norm_rotary(x, weight, cos, sin, eps, rotated) -> np.ndarray:
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    half = rotated // 2
    turned = (normed[..., :half] + 1j * normed[..., half:rotated]) * (cos + 1j * sin)[:, None]
    return np.concatenate([turned.real, turned.imag, normed[..., rotated:]], -1)


def _gated_residual(x, update, gate, index) -> np.ndarray:
    return np.stack([x[i] + gate[r] * update[i] for i, r in enumerate(index.tolist())])


def _snake(x: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return x + np.sin(alpha * x) ** 2 / (alpha + 1e-9)


def _frame_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, groups: int, eps: float) -> np.ndarray:
    result = np.empty_like(x)
    for frame in range(x.shape[2]):
        for rows in np.split(np.arange(x.shape[1]), groups):
            part = x[0, rows, frame]
            normed = (part - part.mean()) / np.sqrt(part.var() + eps)
            scaled = normed * weight[rows, None, None] + bias[rows, None, None]
            result[0, rows, frame] = scaled / (1 + np.exp(-scaled))
    return result


FORMULAS = {
    "Attention": _softmax_attention,
    "modulated_rms_norm": _modulated,
    "norm_rotary": _norm_rotary,
    "gated_residual": _gated_residual,
    "swiglu": lambda gate, up: up * gate / (1 + np.exp(-gate)),
    "snake": _snake,
    "frame_norm": _frame_norm,
}


@st.composite
def attention_cases(draw: st.DrawFn) -> Case:
    batch, heads, rows, keys = (draw(st.integers(1, n)) for n in (2, 4, 20, 20))
    width, torch_seed = draw(st.sampled_from([4, 16, 128])), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(torch_seed)
    q = torch.randn(batch, heads, rows, width, generator=generator)
    k, v = (torch.randn(batch, heads, keys, width, generator=generator) for _ in range(2))
    return Case(ATTENTION, (q, k, v, draw(st.floats(0.01, 0.5)), draw(st.integers(0, 1))))


@st.composite
def norm_cases(draw: st.DrawFn) -> Case:
    rows, width, table = draw(st.integers(1, 20)), draw(st.integers(1, 96)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, width, generator=generator) * draw(st.sampled_from([1e-3, 1.0, 30.0]))
    weight = torch.randn(width, generator=generator)
    scale, shift = (torch.randn(table, width, generator=generator) for _ in range(2))
    index = torch.randint(table, (rows,), generator=generator)
    return Case(MODULATED_RMS_NORM, (x, weight, scale, shift, index, draw(st.sampled_from([1e-6, 1e-5, 1e-2]))))


@st.composite
def rotary_cases(draw: st.DrawFn) -> Case:
    rows, heads, half, rest = (draw(st.integers(1, n)) for n in (12, 5, 24, 16))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # As in a packed projection, each head is a part of a wider one.
    x = torch.randn(rows, heads, 3 * (2 * half + rest), generator=generator).chunk(3, -1)[draw(st.integers(0, 2))]
    weight, angles = torch.randn(2 * half + rest, generator=generator), torch.randn(rows, half, generator=generator)
    return Case(NORM_ROTARY, (x, weight, angles.cos(), angles.sin(), draw(st.sampled_from([1e-6, 1e-5])), 2 * half))


@st.composite
def gated_cases(draw: st.DrawFn) -> Case:
    rows, width, table = draw(st.integers(1, 20)), draw(st.integers(1, 96)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x, update = (torch.randn(rows, width, generator=generator) for _ in range(2))
    index = torch.randint(table, (rows,), generator=generator)
    return Case(GATED_RESIDUAL, (x, update, torch.randn(table, width, generator=generator), index))


@st.composite
def swiglu_cases(draw: st.DrawFn) -> Case:
    rows, width = draw(st.integers(1, 20)), draw(st.integers(1, 96))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    halves = torch.randn(rows, 2 * width, generator=generator) * draw(st.sampled_from([0.1, 1.0, 8.0]))
    return Case(SWIGLU, halves.chunk(2, -1))


@st.composite
def snake_cases(draw: st.DrawFn) -> Case:
    batch, channels, length = (draw(st.integers(1, n)) for n in (2, 5, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(batch, channels, length, generator=generator)
    return Case(SNAKE, (x, torch.rand(1, channels, 1, generator=generator) + 0.5))


@st.composite
def frame_norm_cases(draw: st.DrawFn) -> Case:
    """At least 16 values a group: the mean of fewer may cancel most of them."""
    groups, width, frames, side = (draw(st.integers(1, n)) for n in (4, 3, 5, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(1, groups * width, frames, side + 3, side + 4, generator=generator)
    weight, bias = torch.randn(2, groups * width, generator=generator)
    return Case(FRAME_NORM, (x, weight, bias, groups, draw(st.sampled_from([1e-6, 1e-2]))))


CASES = st.one_of(
    attention_cases(), norm_cases(), rotary_cases(), gated_cases(), swiglu_cases(), snake_cases(), frame_norm_cases()
)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def run_function(case: Case) -> np.ndarray:
    """The op's ONNX function, run by a stock ONNX Runtime on one node."""
    op, tensors = case.op, [x for x in case.arguments if isinstance(x, torch.Tensor)]
    numbers = dict(zip(op.attributes, [x for x in case.arguments if not isinstance(x, torch.Tensor)], strict=True))
    node = onnx.helper.make_node(op.name, op.inputs, ["result"], domain=DOMAIN, **numbers)
    inputs = [
        onnx.helper.make_tensor_value_info(n, ONNX_TYPES[t.dtype], t.shape)
        for n, t in zip(op.inputs, tensors, strict=True)
    ]
    output = onnx.helper.make_tensor_value_info("result", ONNX_TYPES[tensors[0].dtype], tensors[0].shape)
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "one", inputs, [output]),
        functions=[op.function()],
        opset_imports=[onnx.helper.make_opsetid("", ONNX_OPSET), onnx.helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {n: _ort_value(t) for n, t in zip(op.inputs, tensors, strict=True)}
    result = session.run_with_ort_values(None, feed)[0]
    if tensors[0].dtype == torch.bfloat16:
        return torch.from_dlpack(result._ortvalue.to_dlpack()).double().numpy()
    return result.numpy()


def _ort_value(tensor: torch.Tensor) -> onnxruntime.OrtValue:
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16).numpy()
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ONNX_TYPES[tensor.dtype])
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())


@FEW
@given(CASES)
def test_reference_in_float64_is_the_formula(case: Case) -> None:
    case = case.to(torch.float64)
    # Both sides sum up to some hundred terms in float64: a few hundred units of 1.1e-16.
    assert relative(case.op(*case.arguments).numpy(), case.formula()) < 1e-13


@FEW
@given(CASES)
def test_reference_in_float32_is_close_to_the_formula(case: Case) -> None:
    # Sums of at most 128 terms in float32: under 128 units of 6e-8, and rounding errors mostly cancel.
    assert relative(case.op(*case.arguments).numpy(), case.formula()) < 2e-6


@FEW
@given(st.one_of(norm_cases(), rotary_cases()))
def test_norms_in_bfloat16_round_once(case: Case) -> None:
    case = case.to(torch.bfloat16)
    exact = case.formula()
    # One rounding to 8 bits moves a value by at most 2^-8 of it; 1e-5 of the largest is for the float32 inside.
    bound = np.abs(exact) * 2**-8 + 1e-5 * np.abs(exact).max()
    assert np.all(np.abs(case.op(*case.arguments).double().numpy() - exact) <= bound)


@FEW
@given(CASES, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_fake_has_the_shape_dtype_and_strides_of_the_real_result(case: Case, dtype: torch.dtype) -> None:
    case = case.to(dtype)
    real = case.op(*case.arguments)
    with FakeTensorMode() as mode:
        fake = case.op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in case.arguments))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@FEW
@given(CASES)
def test_onnx_function_in_onnxruntime_is_the_reference(case: Case) -> None:
    # Both are float32 with their own order of summation.
    assert relative(run_function(case), case.op(*case.arguments).numpy()) < 3e-6


@settings(max_examples=10, deadline=None)
@given(norm_cases())
def test_onnx_function_of_the_norm_rounds_bfloat16_like_the_reference(case: Case) -> None:
    case = case.to(torch.bfloat16)
    expected = case.op(*case.arguments).double().numpy()
    # A float32 difference may tip a value over a rounding border: one unit in the last place (2^-7 of it), rarely.
    found = run_function(case)
    assert np.all(np.abs(found - expected) <= 2**-7 * np.abs(expected) + 1e-6 * np.abs(expected).max())
    assert np.mean(found != expected) < 0.05


@settings(max_examples=6, deadline=None)
@given(CASES)
def test_torch_accepts_the_operator(case: Case) -> None:
    torch.library.opcheck(case.op.overload, case.arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("heads_first", [True, False])
def test_attention_keeps_the_layout_of_its_query(heads_first: bool) -> None:
    """A compiler reads the result as the fake lays it out: rows before heads is what the projection after it reads."""
    q, k, v = (torch.randn(1, 4, 9, 16) if heads_first else torch.randn(1, 9, 4, 16).transpose(1, 2) for _ in range(3))
    assert ATTENTION(q, k, v, 0.25, 1).stride() == q.stride()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_chosen_for_the_cuda_device_is_the_formula(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 8, 1024, 128, generator=generator) for _ in range(3))
    case = Case(ATTENTION, (q, k, v, 128**-0.5, 0)).to(dtype)
    found = case.op(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in case.arguments)).cpu().double().numpy()
    # bfloat16 kernels round the weights and the result to 8 bits.
    assert relative(found, case.formula()) < (2e-6 if dtype == torch.float32 else 2**-7)


def test_entries_have_names_of_their_own() -> None:
    names = [op.name for op in REGISTRY]
    assert len(set(names)) == len(names)


def test_find_names_what_is_known() -> None:
    assert find("Attention") is ATTENTION
    with pytest.raises(KeyError, match="modulated_rms_norm"):
        find("attention")
