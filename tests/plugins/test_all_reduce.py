"""The op that adds up the ranks' partial results: what it takes, what it refuses, its function for one rank."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from export.emit import attach_functions
from plugins.op import DOMAIN, ONNX_OPSET
from plugins.ops.all_reduce import OP
from plugins.ranks import Loopback, handle_of


class Doubling(Loopback):
    """A rank whose partner has the same part."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part + part


def handle(group: Loopback) -> torch.Tensor:
    return torch.tensor([handle_of(group)])


def test_parts_are_added_over_the_group_of_the_handle() -> None:
    x = torch.randn(3, 5)
    assert torch.equal(OP(x, handle(Doubling(2)), 2), 2 * x)
    assert torch.equal(OP(x, handle(Loopback()), 1), x)


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group \d+: has 2 ranks; the graph was made for 4"):
        OP(torch.zeros(1), handle(Loopback(2)), 4)


def test_a_handle_of_no_group_is_refused() -> None:
    with pytest.raises(LookupError, match="group 999: no group of ranks has this handle"):
        OP(torch.zeros(1), torch.tensor([999]), 1)


def test_sums_in_a_narrow_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"all_reduce: x is torch\.bfloat16: must be torch\.float32"):
        OP(torch.zeros(1, dtype=torch.bfloat16), handle(Loopback()), 1)


def test_fake_is_as_the_real_result() -> None:
    torch.library.opcheck(
        OP.overload, (torch.randn(4, 3), handle(Loopback()), 1), test_utils=("test_schema", "test_faketensor")
    )
    with FakeTensorMode() as mode:
        fake = OP(mode.from_tensor(torch.randn(6, 4).t()), mode.from_tensor(torch.zeros(1, dtype=torch.int64)), 2)
    assert (fake.shape, fake.stride()) == ((4, 6), (6, 1))


def test_its_function_is_identity_for_one_rank() -> None:
    """Two calls, one definition of what they call."""
    helper = onnx.helper
    nodes = [helper.make_node(OP.name, [x, "group"], [f"sum_{x}"], domain=DOMAIN, ranks=1) for x in ("a", "b")]
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 4]) for name in ("a", "b")]
    inputs.append(helper.make_tensor_value_info("group", onnx.TensorProto.INT64, [1]))
    outputs = [helper.make_tensor_value_info(f"sum_{x}", onnx.TensorProto.FLOAT, ["rows", 4]) for x in ("a", "b")]
    graph = helper.make_graph(nodes, "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", ONNX_OPSET)], ir_version=10)
    attach_functions(model)
    assert sorted(function.name for function in model.functions) == ["DistCollective", "all_reduce"]
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {name: np.random.default_rng(5).standard_normal((3, 4), np.float32) for name in ("a", "b")}
    found = session.run(None, given | {"group": np.array([0])})
    assert all(np.array_equal(x, y) for x, y in zip(found, given.values(), strict=True))
