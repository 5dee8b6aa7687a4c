"""The exchange of rows for heads says the same as an op and as an ONNX function, and as plain slices of the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from export.emit import attach_functions
from plugins.op import DOMAIN, DOMAIN_VERSION, ONNX_OPSET, Op
from plugins.ops.dist_collective import NAME
from plugins.ops.ulysses_all_to_all import GATED_HEADS, HEADS, ROWS
from plugins.ranks import Loopback, handle_of

FEW = settings(max_examples=20, deadline=None)
WIDTH = 3


@dataclass(frozen=True)
class Shares:
    """A sequence and its ranks; `padding` rows of each rank would not be needed."""

    ranks: int
    rows: int
    heads: int
    padding: int = 0

    @property
    def local(self) -> int:
        return -(-self.rows // self.ranks) + self.padding

    def whole(self, name: str) -> np.ndarray:
        """[rows, all heads, WIDTH], all different."""
        drawn = np.random.default_rng([self.rows, len(name)]).standard_normal((self.rows, self.heads, WIDTH))
        return drawn.astype(np.float32)

    def rows_of(self, whole: np.ndarray, rank: int) -> np.ndarray:
        """A rank's rows, [local, all heads, WIDTH], which may end in rows that are no numbers."""
        held = whole[rank * self.local : (rank + 1) * self.local]
        return np.concatenate([held, np.full((self.local - len(held), *held.shape[1:]), np.nan, np.float32)])

    def heads_of(self, whole: np.ndarray, rank: int) -> np.ndarray:
        """A rank's heads, [rows, heads / ranks, WIDTH]."""
        share = self.heads // self.ranks
        return whole[:, rank * share : (rank + 1) * share]


@st.composite
def shares(draw: st.DrawFn) -> Shares:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    return Shares(ranks, draw(st.integers(1, 40)), ranks * draw(st.integers(1, 3)), draw(st.integers(0, 2)))


def model(op: Op, ranks: int, inputs: Mapping[str, Any], functions: bool) -> onnx.ModelProto:
    """One node and its function; or, without `functions`, what they say with the collective as a node."""
    helper = onnx.helper
    kinds = {np.dtype(np.float32): onnx.TensorProto.FLOAT, np.dtype(np.int64): onnx.TensorProto.INT64}
    named = [helper.make_tensor_value_info(n, kinds[a.dtype], [None] * a.ndim) for n, a in inputs.items()]
    outputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [None] * 3) for n in op.results]
    node = helper.make_node(op.name, op.inputs, op.results, domain=DOMAIN, ranks=ranks)
    imports = [helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    made = helper.make_model(helper.make_graph([node], "one", named, outputs), opset_imports=imports, ir_version=10)
    attach_functions(made)
    onnx.checker.check_model(made, full_check=True)
    if not functions:
        (called,) = (function for function in made.functions if function.name == NAME)
        made.functions.remove(called)
        return onnx.inliner.inline_local_functions(made)
    return made


@dataclass
class Exchange:
    """What DistCollective does in TensorRT: equal blocks along the first axis, to and from threads that are ranks."""

    ranks: int
    sent: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=20)

    def operator(self, rank: int) -> type[OpRun]:
        exchange = self

        class DistCollective(OpRun):
            op_domain = DOMAIN

            def _run(self, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray]:
                assert attributes["collective_operation"] == "all_to_all"
                assert attributes["nb_rank"] == exchange.ranks
                exchange.sent[rank] = x
                exchange.barrier.wait()
                blocks = [np.split(exchange.sent[source], exchange.ranks)[rank] for source in range(exchange.ranks)]
                return (np.concatenate(blocks),)

        return DistCollective


def on_all_ranks(op: Op, ranks: int, inputs: Callable[[int], dict[str, np.ndarray]]) -> list[list[np.ndarray]]:
    """Every rank's results of the op's function."""
    exchange = Exchange(ranks)

    def run(rank: int) -> list[np.ndarray]:
        given = inputs(rank)
        evaluator = ReferenceEvaluator(model(op, ranks, given, functions=False), new_ops=[exchange.operator(rank)])
        return list(evaluator.run(None, given))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


NOWHERE = np.zeros(1, np.int64)


def before(op: Op, case: Shares, rank: int) -> dict[str, np.ndarray]:
    parts = {name: case.rows_of(case.whole(name), rank) for name in op.inputs[: len(op.results)]}
    return parts | {"sequence": np.zeros(case.rows, np.int64), "group": NOWHERE}


@FEW
@given(shares(), st.sampled_from([HEADS, GATED_HEADS]))
def test_function_gives_each_rank_all_rows_of_its_heads(case: Shares, op: Op) -> None:
    for rank, results in enumerate(on_all_ranks(op, case.ranks, lambda rank: before(op, case, rank))):
        for name, found in zip(op.inputs[: len(op.results)], results, strict=True):
            np.testing.assert_array_equal(found, case.heads_of(case.whole(name), rank))


@FEW
@given(shares())
def test_function_gives_each_rank_all_heads_of_its_rows(case: Shares) -> None:
    whole = case.whole("mixed")

    def inputs(rank: int) -> dict[str, np.ndarray]:
        local = np.zeros((case.local, 2), np.float32)
        return {"mixed": case.heads_of(whole, rank), "local": local, "group": NOWHERE}

    for rank, (found,) in enumerate(on_all_ranks(ROWS, case.ranks, inputs)):
        np.testing.assert_array_equal(found, np.nan_to_num(case.rows_of(whole, rank)))


@FEW
@given(shares(), st.sampled_from([HEADS, GATED_HEADS]))
def test_function_without_collectives_is_the_op_over_a_group_that_sends_to_itself(case: Shares, op: Op) -> None:
    """What stock ONNX Runtime makes of it; for one rank it is the exchange itself."""
    inputs = before(op, case, 0)
    made = model(op, case.ranks, inputs, functions=True)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    tensors = [torch.from_numpy(array) for name, array in inputs.items() if name != "group"]
    expected = op(*tensors, torch.tensor([handle_of(Loopback(case.ranks))]), case.ranks)
    for found, wanted in zip(session.run(None, inputs), expected, strict=True):
        np.testing.assert_array_equal(found, wanted.numpy())


def arguments(op: Op, ranks: int) -> tuple[Any, ...]:
    case = Shares(ranks, rows=7, heads=8)
    group = torch.tensor([handle_of(Loopback(ranks))])
    if op is ROWS:
        return torch.randn(7, 8 // ranks, WIDTH), torch.zeros(case.local), group, ranks
    parts = [torch.randn(case.local, 8, 2 * WIDTH)[..., ::2] for _ in op.results]
    return *parts, torch.zeros(7, dtype=torch.int64), group, ranks


@pytest.mark.parametrize("op", [HEADS, GATED_HEADS, ROWS], ids=lambda op: op.name)
@pytest.mark.parametrize("ranks", [1, 2])
def test_fake_is_as_the_real_results_which_share_no_memory(op: Op, ranks: int) -> None:
    given_arguments = arguments(op, ranks)
    torch.library.opcheck(op.overload, given_arguments, test_utils=("test_schema", "test_faketensor"))
    found = op(*given_arguments)
    results = found if isinstance(found, tuple) else (found,)
    owners = [x.untyped_storage().data_ptr() for x in (*results, *(x for x in given_arguments[:-1]))]
    assert len(set(owners)) == len(owners)


class OneBuffer(Loopback):
    """A group whose results are parts of one piece of memory."""

    def to_heads(self, parts: Any, rows: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.stack(super().to_heads(parts, rows)))


def test_parts_of_one_buffer_become_tensors_of_their_own() -> None:
    *tensors, _, ranks = arguments(HEADS, 2)
    found = HEADS(*tensors, torch.tensor([handle_of(OneBuffer(2))]), ranks)
    expected = HEADS(*tensors, torch.tensor([handle_of(Loopback(2))]), ranks)
    assert len({x.untyped_storage().data_ptr() for x in found}) == 3
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("ranks", "heads", "rows", "complaint"),
    [
        (4, 8, 9, "2 rows on each of 4 ranks: must be at least 3, as the sequence has 9"),
        (4, 6, 7, "6 heads cannot be shared by 4 ranks; must be a multiple"),
    ],
)
def test_what_does_not_fit_the_group_is_refused(ranks: int, heads: int, rows: int, complaint: str) -> None:
    parts = torch.zeros(3, 2, heads, WIDTH)
    group = torch.tensor([handle_of(Loopback(ranks))])
    with pytest.raises(ValueError, match=complaint):
        HEADS(*parts, torch.zeros(rows), group, ranks)


def test_rows_that_have_no_place_are_refused() -> None:
    group = torch.tensor([handle_of(Loopback(2))])
    with pytest.raises(ValueError, match="3 rows on each of 2 ranks: must be at least 4, as the sequence has 7"):
        ROWS(torch.zeros(7, 1, WIDTH), torch.zeros(3), group, 2)


def test_a_graph_for_another_number_of_ranks_is_refused() -> None:
    group = torch.tensor([handle_of(Loopback(2))])
    with pytest.raises(ValueError, match=r"group \d+: has 2 ranks; the graph was made for 4"):
        ROWS(torch.zeros(7, 1, WIDTH), torch.zeros(3), group, 4)
