"""Dense, skipping and SAGE attention: the sequential tile rule and the roundings in float64, padding, ONNX Runtime."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from plugins.op import DOMAIN, DOMAIN_VERSION, ONNX_OPSET, Op
from plugins.ops import dense_attention, sage_attention, skip_softmax_attention

FEW = settings(max_examples=20, deadline=None)
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """Queries, keys and values [B, H, S, d], NaN in the padding, and how they are to be computed."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    valid: int
    threshold: float
    scale: float
    blocks: tuple[int, int]
    tiles: tuple[int, int]

    def arguments(self, op: Op, dtype: torch.dtype = torch.float32) -> tuple:
        threshold = (torch.tensor([self.threshold], dtype=torch.float32),) if op is not dense_attention.OP else ()
        numbers = {"dense_attention": (), "skip_softmax_attention": self.tiles}
        inputs = (*(x.to(dtype) for x in self.tensors), torch.tensor([self.valid]), *threshold)
        return *inputs, self.scale, *numbers.get(op.name, self.blocks + self.tiles)

    def real(self) -> tuple[Doubles, ...]:
        """The valid rows in float64."""
        return tuple(x[:, :, : self.valid].double().numpy() for x in self.tensors)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, heads, rows, width = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 50)), 16
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    q, k, v = (torch.randn(batch, heads, rows, width, generator=generator) for _ in range(3))
    k = k * draw(st.sampled_from([0.0, 1.0, 4.0])) + draw(st.sampled_from([0.0, 8.0]))
    valid = draw(st.integers(1, rows))
    for x in (q, k, v):
        x[:, :, valid:] = float("nan")
    return Case(
        (q, k, v),
        valid,
        draw(st.sampled_from([0.0, 1e-4, 0.02, 0.3, 1.0])),
        draw(st.floats(0.05, 0.5)),
        (draw(st.sampled_from([0, 1, 4, 16])), draw(st.sampled_from([0, 1, 4, 16]))),
        (draw(st.sampled_from([1, 4, 64])), draw(st.sampled_from([1, 8, 128]))),
    )


def sequential(case: Case, q: Doubles, k: Doubles, v: Doubles, scale_weights: bool) -> tuple[Doubles, NDArray]:
    """The rule as kernels follow it: tile after tile with a running maximum, which a skipped tile does not move."""
    result, counts = np.zeros_like(q), np.zeros(q.shape[:2], np.int64)
    for head in np.ndindex(*q.shape[:2]):
        for start in range(0, case.valid, case.tiles[0]):
            queries = slice(start, min(start + case.tiles[0], case.valid))
            kept, counts_here = kept_keys(case, q[head][queries] @ k[head].T * case.scale)
            counts[head] += counts_here
            scores = np.where(kept, q[head][queries] @ k[head].T * case.scale, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            total = weights.sum(1, keepdims=True)
            stored = to_e4m3(weights * 256) / 256 if scale_weights else weights
            result[head][queries] = stored @ v[head] / total
    return result, counts


def kept_keys(case: Case, scores: Doubles) -> tuple[NDArray[np.bool_], int]:
    kept, skipped = np.ones(case.valid, bool), 0
    running = np.full(len(scores), -np.inf)
    for first in range(0, case.valid, case.tiles[1]):
        keys = slice(first, first + case.tiles[1])
        largest = scores[:, keys].max(1)
        if first and np.all(np.exp(largest - running) < np.float32(case.threshold)):
            kept[keys] = False
            skipped += 1
        else:
            running = np.maximum(running, largest)
    return kept, skipped


def to_e4m3(x: Doubles) -> Doubles:
    # Torch rounds a float64 to float32 on its way, which can put it on the middle of two E4M3 values.
    return np.clip(x, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def rounded_blocks(x: Doubles, block: int) -> Doubles:
    result = np.empty_like(x)
    block = block or x.shape[2]
    for first in range(0, x.shape[2], block):
        rows = x[:, :, first : first + block]
        scale = np.maximum(np.abs(rows).max((2, 3), keepdims=True), 1e-3) / 448
        result[:, :, first : first + block] = to_e4m3(rows / scale) * scale
    return result


def sage_formula(case: Case) -> tuple[Doubles, NDArray]:
    q, k, v = case.real()
    if case.tensors[1].shape[2] < case.blocks[1]:
        return sequential(case, q, k, v, scale_weights=False)
    q, k = rounded_blocks(q, case.blocks[0]), rounded_blocks(k - k.mean(2, keepdims=True), case.blocks[1])
    channel = np.maximum(np.abs(v).max(2, keepdims=True), 1e-3) / 448
    return sequential(case, q, k, to_e4m3(v / channel) * channel, scale_weights=True)


def formula(op: Op, case: Case) -> tuple[Doubles, NDArray | None]:
    if op is sage_attention.OP:
        return sage_formula(case)
    if op is skip_softmax_attention.OP:
        return sequential(case, *case.real(), scale_weights=False)
    q, k, v = case.real()
    scores = q @ k.swapaxes(2, 3) * case.scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v, None


OPS = (dense_attention.OP, skip_softmax_attention.OP, sage_attention.OP)
EACH = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def call(op: Op, arguments: tuple) -> tuple[torch.Tensor, torch.Tensor | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = op(*arguments)
    return found if isinstance(found, tuple) else (found, None)


def assert_same(case: Case, found: torch.Tensor, expected: Doubles, op: Op, unit: float) -> None:
    """Padding is zero; the rest agrees to `unit` of the values' largest magnitude.

    Where a float32 is rounded to E4M3 it may fall to the other side of a middle than the float64: such a weight or
    value differs by 2^-3 of itself. That happens to one in thousands, and each is one of many terms.
    """
    largest = np.abs(case.real()[2]).max() + 1e-3
    assert torch.all(found[:, :, case.valid :] == 0)
    difference = np.abs(found[:, :, : case.valid].double().numpy() - expected) / largest
    if op is sage_attention.OP and unit > 1e-9:
        assert difference.max() <= 2**-3
        assert np.mean(difference > unit) < 0.1
    else:
        assert difference.max() <= unit


def near_a_border(case: Case, op: Op) -> bool:
    """Whether a tile's decision may fall either way in another precision: its ratio is that near the threshold."""
    lower, upper = (
        Case(case.tensors, case.valid, case.threshold * f, case.scale, case.blocks, case.tiles) for f in (0.97, 1.03)
    )
    return not np.array_equal(formula(op, lower)[1], formula(op, upper)[1])


@EACH
@FEW
@given(cases())
def test_reference_in_float64_is_the_formula(op: Op, case: Case) -> None:
    found, counts = call(op, case.arguments(op, torch.float64))
    expected, expected_counts = formula(op, case)
    if counts is None or np.array_equal(counts.numpy(), expected_counts):
        # SAGE's roundings are of float64 quotients on both sides, which are the same to the last bit or nearly so.
        assert_same(case, found, expected, op, 1e-12 if op is not sage_attention.OP else 1e-8)
    else:
        assert near_a_border(case, op)


@EACH
@FEW
@given(cases())
def test_reference_in_float32_is_close_to_the_formula(op: Op, case: Case) -> None:
    found, counts = call(op, case.arguments(op))
    expected, expected_counts = formula(op, case)
    if counts is None or np.array_equal(counts.numpy(), expected_counts):
        # Scores of up to 60 are off by some units of 6e-8, and so are the weights, relative to themselves.
        assert_same(case, found, expected, op, 2e-5)
    else:
        assert near_a_border(case, op)


@EACH
@FEW
@given(cases())
def test_onnx_function_in_onnxruntime_is_the_reference(op: Op, case: Case) -> None:
    expected, expected_counts = call(op, case.arguments(op))
    found = run_function(op, case.arguments(op))
    if expected_counts is None or torch.equal(found[1], expected_counts):
        assert_same(case, found[0], expected[:, :, : case.valid].double().numpy(), op, 2e-5)
    else:
        assert near_a_border(case, op)


@EACH
@FEW
@given(cases(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_fake_has_the_shapes_and_dtypes_of_the_real_results(op: Op, case: Case, dtype: torch.dtype) -> None:
    arguments = case.arguments(op, dtype)
    real = call(op, arguments)
    with FakeTensorMode() as mode:
        fake = call(op, tuple(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
    for one, other in zip(fake, real, strict=True):
        assert (one is None and other is None) or (one.shape, one.dtype) == (other.shape, other.dtype)


@EACH
def test_torch_accepts_the_operator(op: Op) -> None:
    q = torch.randn(1, 2, 20, 16)
    case = Case((q, q + 1, q * 2), 17, 0.1, 0.25, (1, 16), (4, 8))
    torch.library.opcheck(op.overload, case.arguments(op), test_utils=("test_schema", "test_faketensor"))


def peaked(rows: int, skippable: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One head in which the first key tiles hold the large scores of every query, and a share holds far lower ones."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, rows, 32, generator=generator) for _ in range(3))
    q[..., 0] = 10
    k[..., 0] = 0
    k[:, :, int(rows * (1 - skippable)) :, 0] = -30
    return q, k, v


def test_skipped_tiles_are_those_that_add_next_to_nothing() -> None:
    q, k, v = peaked(256, 0.5)
    exact = dense_attention.OP(q, k, v, torch.tensor([256]), 32**-0.5)
    result, skipped = skip_softmax_attention.OP(q, k, v, torch.tensor([256]), torch.tensor([1e-6]), 32**-0.5, 64, 32)
    assert skipped.tolist() == [[4 * 4]]
    # At most 8 tiles of 32 weights are left out, each weight below 1e-6 of the largest; values are below 5.
    assert (result - exact).abs().max() < 256 * 1e-6 * 5


def test_threshold_zero_skips_nothing() -> None:
    q, k, v = peaked(256, 0.7)
    result, skipped = skip_softmax_attention.OP(q, k, v, torch.tensor([256]), torch.zeros(1), 32**-0.5, 64, 32)
    assert skipped.tolist() == [[0]]
    torch.testing.assert_close(result, dense_attention.OP(q, k, v, torch.tensor([256]), 32**-0.5), rtol=0, atol=1e-6)


def test_sage_on_fewer_rows_than_a_block_is_dense_and_warns_once() -> None:
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    arguments = (q, k, v, torch.tensor([9]), torch.zeros(1), 0.25, 1, 16, 64, 128)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        result, _ = sage_attention.OP(*arguments)
        sage_attention.OP(*arguments)
    assert [str(w.message) for w in caught] == ["SAGE attention over less than a block of 16 keys is computed dense"]
    torch.testing.assert_close(result, dense_attention.OP(q, k, v, torch.tensor([9]), 0.25), rtol=0, atol=1e-6)


@pytest.mark.parametrize("key_block", [1, 16, 0])
def test_smoothing_makes_a_large_mean_of_the_keys_harmless(key_block: int) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 256, 64, generator=generator, dtype=torch.float64) for _ in range(3))
    errors = {}
    for mean in (0.0, 20.0):
        shifted = k + mean * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(3)).double()
        exact = dense_attention.OP(q, shifted, v, torch.tensor([256]), 0.125)
        found, _ = sage_attention.OP(q, shifted, v, torch.tensor([256]), torch.zeros(1), 0.125, 1, key_block, 64, 128)
        errors[mean] = ((found - exact).norm() / exact.norm()).item()
    # The softmax does not see what all keys have in common, and neither do keys without their mean.
    assert errors[20.0] == pytest.approx(errors[0.0], rel=1e-3)
    assert errors[0.0] < 0.08


def test_counts_are_of_tiles_with_valid_queries_and_keys() -> None:
    q, k, v = peaked(256, 0.5)
    for x in (q, k, v):
        x[:, :, 200:] = float("nan")
    _, skipped = skip_softmax_attention.OP(q, k, v, torch.tensor([200]), torch.tensor([1e-6]), 32**-0.5, 64, 32)
    # Rows 128 to 199 are three tiles of keys, the last with 8 of them; 200 rows are four tiles of queries.
    assert skipped.tolist() == [[4 * 3]]


def run_function(op: Op, arguments: tuple) -> list[torch.Tensor]:
    """The op's ONNX function, run by a stock ONNX Runtime on one node."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    numbers = dict(zip(op.attributes, [x for x in arguments if not isinstance(x, torch.Tensor)], strict=True))
    helper, kinds = onnx.helper, {torch.float32: 1, torch.int64: 7}
    node = helper.make_node(op.name, op.inputs, op.results, domain=DOMAIN, **numbers)
    inputs = [
        helper.make_tensor_value_info(n, kinds[t.dtype], t.shape) for n, t in zip(op.inputs, tensors, strict=True)
    ]
    shapes = {"result": (1, tensors[0].shape), "skipped": (7, tensors[0].shape[:2])}
    outputs = [helper.make_tensor_value_info(name, *shapes[name]) for name in op.results]
    model = helper.make_model(
        helper.make_graph([node], "one", inputs, outputs),
        functions=[op.function()],
        opset_imports=[helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {n: t.numpy() for n, t in zip(op.inputs, tensors, strict=True)})
    return [torch.from_numpy(x) for x in found]
