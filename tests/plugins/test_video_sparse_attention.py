"""Video-sparse attention: the reference, its fake and its ONNX function against a float64 loop over query tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch._subclasses.fake_tensor import FakeTensorMode

from plugins.distilled import VideoSparse
from plugins.op import DOMAIN, DOMAIN_VERSION, ONNX_OPSET
from plugins.ops.video_sparse_attention import OP, check, sparse
from plugins.video_tiles import TILE, TileCounts, along, heads_together, kept_tiles, scratch_bytes
from tests.video_sparse import Doubles, Tiles, formula

FEW = settings(max_examples=20, deadline=None)
WIDTH = 16


@dataclass(frozen=True)
class Case:
    """Queries, keys, values and gates [1, H, S, d] in float64, and tiles of at most `places` rows."""

    tensors: tuple[torch.Tensor, ...]
    tiles: Tiles
    places: int
    prefix: int
    kept: int
    scale: float

    def arguments(self, dtype: torch.dtype) -> tuple:
        rows = torch.full((len(self.tiles), self.places), -1)
        tile_of = torch.empty(sum(map(len, self.tiles)), dtype=torch.int64)
        for index, tile in enumerate(self.tiles):
            rows[index, : len(tile)] = torch.tensor(tile)
            tile_of[tile] = index
        counts = torch.tensor([self.prefix, self.kept])
        return *(x.to(dtype) for x in self.tensors), rows, tile_of, counts, self.scale

    def formula(self) -> Doubles:
        query, key, value, gate = (x[0].numpy() for x in self.tensors)
        return formula(query, key, value, gate, self.tiles, self.prefix, self.kept, self.scale)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Rows lie anywhere in their tiles; among many tiles, some are exact copies of others, which score alike."""
    heads, places = draw(st.integers(1, 3)), draw(st.sampled_from([1, 4, 8]))
    sizes = draw(st.lists(st.integers(1, places), min_size=1, max_size=12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    order = iter(torch.randperm(sum(sizes), generator=generator).tolist())
    tiles = [[next(order) for _ in range(size)] for size in sizes]
    # Rounded, so that all precisions see the same values.
    tensors = tuple(torch.randn(1, heads, sum(sizes), WIDTH, generator=generator).bfloat16().double() for _ in range(4))
    if draw(st.booleans()):
        tensors[1][:, :, tiles[-1]] = 0
        tensors[1][:, :, tiles[len(tiles) // 2]] = 0
    prefix = draw(st.integers(0, len(tiles) - 1))
    return Case(tensors, tiles, places, prefix, draw(st.integers(1, len(tiles) - prefix)), draw(st.floats(0.1, 1)))


def off(found: torch.Tensor, expected: Doubles) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.abs(found[0].double().numpy() - expected).max() / np.abs(expected).max())


@FEW
@given(cases())
def test_reference_in_float64_is_the_formula(case: Case) -> None:
    # Both sides sum some tens of terms in float64.
    assert off(OP(*case.arguments(torch.float64)), case.formula()) < 1e-13


@FEW
@given(cases())
def test_reference_in_float32_is_close_to_the_formula(case: Case) -> None:
    # Some tens of terms, each to 6e-8. Scores that differ by less than that would be ranked otherwise; these do not.
    assert off(OP(*case.arguments(torch.float32)), case.formula()) < 3e-6


@FEW
@given(cases())
def test_bfloat16_is_rounded_once(case: Case) -> None:
    exact = case.formula()
    found = OP(*case.arguments(torch.bfloat16))[0].double().numpy()
    assert np.all(np.abs(found - exact) <= np.abs(exact) * 2**-8 + 1e-5 * np.abs(exact).max())


@FEW
@given(cases())
def test_onnx_function_in_onnxruntime_is_the_reference(case: Case) -> None:
    assert off(run_function(case), OP(*case.arguments(torch.float32))[0].double().numpy()) < 3e-6


@FEW
@given(cases(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_fake_has_the_shape_dtype_and_strides_of_the_real_result(case: Case, dtype: torch.dtype) -> None:
    arguments = case.arguments(dtype)
    real = OP(*arguments)
    with FakeTensorMode() as mode:
        fake = OP(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def example(prefix: int = 1, kept: int = 1) -> Case:
    generator = torch.Generator().manual_seed(0)
    tensors = tuple(torch.randn(1, 2, 20, WIDTH, dtype=torch.float64, generator=generator) for _ in range(4))
    return Case(tensors, [list(range(i, i + 4)) for i in range(0, 20, 4)], 4, prefix, kept, 0.25)


def test_torch_accepts_the_operator() -> None:
    arguments = example().arguments(torch.float32)
    torch.library.opcheck(OP.overload, arguments, test_utils=("test_schema", "test_faketensor"))


def test_all_tiles_chosen_and_a_closed_gate_is_dense_attention() -> None:
    q, k, v, gate, *tiles = example(kept=4).arguments(torch.float64)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.25)
    assert torch.allclose(OP(q, k, v, torch.zeros_like(gate), *tiles), dense, rtol=1e-12)
    # One less, and it is another: nothing falls back to everything.
    q, k, v, gate, *tiles = example(kept=3).arguments(torch.float64)
    assert not torch.allclose(OP(q, k, v, torch.zeros_like(gate), *tiles), dense, rtol=1e-2)


def test_tiles_that_score_alike_are_taken_by_their_index() -> None:
    q, k, v, gate, *tiles = example(prefix=0, kept=2).arguments(torch.float64)
    k[:], gate[:] = 0, 0
    # All keys alike: a mean over the first two tiles' eight rows.
    expected = v[:, :, :8].mean(2, keepdim=True).expand_as(v)
    assert torch.allclose(OP(q, k, v, gate, *tiles), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda x: (*x[:4], x[4][:, :4]), r"in tiles of 4: must be .* in tiles of 64"),
        (lambda x: (*(t[..., :24] for t in x[:4]), x[4]), r"\[1, 2, 64, 24\] .* heads of 16, 32, 64, 128 channels"),
        (lambda x: (*(t.double() for t in x[:4]), x[4]), "float64 .*: must be bfloat16 or float16 or float32"),
        (lambda x: (x[0], x[1].float(), *x[2:]), r"key torch.float32 .*: must be as the query, bfloat16"),
        (lambda x: (*x[:3], x[3][:, :1], x[4]), r"gate .*\[1, 1, 64, 32\]: must be as the query"),
        (lambda x: (*(t.mT.contiguous().mT for t in x[:4]), x[4]), "channels of each row must lie side by side"),
    ],
)
def test_kernels_refuse_what_they_would_have_to_do_densely(change: object, rule: str) -> None:
    heads = [torch.zeros(1, 2, 64, 32, dtype=torch.bfloat16) for _ in range(4)]
    arguments = change((*heads, torch.zeros(1, TILE, dtype=torch.int64)))  # type: ignore[operator]
    check(*heads, torch.zeros(1, TILE, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"video_sparse_attention: .*{rule}"):
        check(*arguments)


def test_no_gpu_is_given_the_reference() -> None:
    """It holds all scores: at a clip's size that is refused, not tried."""
    assert all(OP.implementation("cuda", capability) is sparse for capability in ((7, 5), (8, 9), (9, 0), (12, 0)))


def test_compilers_call_it_as_it_is() -> None:
    assert OP.plain_implementation("cpu") is None
    assert OP.plain_implementation("cuda", (9, 0)) is None


@pytest.mark.parametrize(
    ("grid", "sparsity", "expected"),
    # Video tiles of 243 frames of 1344x768, and of 107, 124 and 362 (spec/model.md 8.3, spec/contract.md 4.4).
    [
        ((72, 24, 42), 0.9, (1188, 119)),
        ((72, 24, 42), 0.8, (1188, 238)),
        ((32, 24, 42), 0.9, (528, 53)),
        ((37, 24, 42), 0.9, (660, 66)),
        ((107, 24, 42), 0.9, (1782, 179)),
        ((1, 1, 1), 0.9, (1, 1)),
        ((4, 4, 8), 0.0, (2, 2)),
    ],
)
def test_counts_are_those_of_the_specification(
    grid: tuple[int, int, int], sparsity: float, expected: tuple[int, int]
) -> None:
    counts = TileCounts.of((512, 810), grid, sparsity)
    assert (counts.video, counts.kept) == expected
    assert counts.prefix == 8 + 13
    assert counts.all == counts.prefix + np.prod(along(grid))


@pytest.mark.parametrize("tile", [32, 128])
def test_tiles_of_another_size_are_not_taken_for_these(tile: int) -> None:
    with pytest.raises(ValidationError, match="tile"):
        VideoSparse(tile=tile, sparsity=0.9)


def test_kept_tiles_are_counted_in_the_number_as_it_is_written() -> None:
    # In binary 1 - 0.7 is above 3/10.
    assert kept_tiles(10, 0.7) == 3
    assert [kept_tiles(n, 0.9) for n in (1, 10, 11, 20, 21)] == [1, 1, 2, 2, 3]


@given(st.integers(1, 112), st.integers(1, 2000))
def test_heads_are_chosen_for_in_groups_within_the_scratch(heads: int, tiles: int) -> None:
    together = heads_together(heads, tiles)
    assert 1 <= together <= heads
    assert together == 1 or scratch_bytes(together, tiles) <= 256 << 20
    # No smaller number makes as few groups.
    groups = -(-heads // together)
    assert together == 1 or -(-heads // (together - 1)) > groups


def run_function(case: Case) -> torch.Tensor:
    """The op's ONNX function, run by a stock ONNX Runtime on one node."""
    arguments = case.arguments(torch.float32)
    tensors, kinds = arguments[:-1], {torch.float32: 1, torch.int64: 7}
    node = onnx.helper.make_node(OP.name, OP.inputs, ["result"], domain=DOMAIN, scale=arguments[-1])
    named = dict(zip(OP.inputs, tensors, strict=True))
    inputs = [onnx.helper.make_tensor_value_info(n, kinds[t.dtype], t.shape) for n, t in named.items()]
    output = onnx.helper.make_tensor_value_info("result", 1, tensors[0].shape)
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "one", inputs, [output]),
        functions=[OP.function()],
        opset_imports=[onnx.helper.make_opsetid("", ONNX_OPSET), onnx.helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in named.items()})
    return torch.from_numpy(found)
