"""Lowered attention is exact, streams over rows, and is never lost on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from engines.backends.onnxruntime import LoweringError, check, lower
from export.emit import attach_functions
from plugins.ops import attention

HEADS, SIZE = 8, 128
"""The miniature's attention; also a width at which scores and rows differ in size."""


def attention_model(rows: int | str, heads: int | str = HEADS) -> onnx.ModelProto:
    """`h3::Attention` between named inputs, as the emitter writes it: nodes, imports and function body."""
    shape = [1, heads, rows, SIZE]
    node = helper.make_node("Attention", ["q", "k", "v"], ["mixed"], domain="h3", scale=SIZE**-0.5, TRT_decomposable=1)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "qkv"]
    output = helper.make_tensor_value_info("mixed", TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "attend", inputs, [output])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("h3", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=[attention.OP.function()], ir_version=10)


def run(model: onnx.ModelProto, *tensors: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, dict(zip("qkv", (t.numpy() for t in tensors), strict=True)))[0])


@pytest.mark.parametrize("rows", [1, 2, 63, 1025])
def test_lowered_attention_equals_float64_attention(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    query, key, value = (torch.randn(1, HEADS, rows, SIZE, generator=generator) for _ in range(3))
    wide = [x.double() for x in (query, key, value)]
    wanted = torch.softmax(wide[0] @ wide[1].transpose(2, 3) * SIZE**-0.5, dim=-1) @ wide[2]
    found = run(lower(attention_model("rows")), query, key, value)
    # float32 sums of 128 products and of up to 1,025 weighted rows, on values of order 1.
    assert (found.double() - wanted).abs().max() < 2e-6


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exchange_between_ranks_is_refused_and_one_of_a_single_rank_is_identity(ranks: int) -> None:
    node = helper.make_node("all_reduce", ["x", "group"], ["y"], "node_sum", domain="h3", ranks=ranks)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows"]) for name in "xy")
    group = helper.make_tensor_value_info("group", TensorProto.INT64, [1])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("h3", 1)]
    model = helper.make_model(helper.make_graph([node], "layer", [x, group], [y]), opset_imports=imports, ir_version=10)
    attach_functions(model)
    if ranks == 1:
        assert check(lower(model), model) == {"ai.onnx::Identity": 1}
        return
    with pytest.raises(LoweringError, match=r"graph layer: exchanges between ranks at node_sum: .* must be cut there"):
        check(lower(model), model)


def test_the_engine_has_only_operators_that_onnx_runtime_has() -> None:
    model = attention_model("rows")
    engine = lower(model)
    census = check(engine, model)
    assert census == {
        "ai.onnx::Constant": 2,
        "ai.onnx::Reshape": 4,
        "ai.onnx::Transpose": 4,
        "com.microsoft::MultiHeadAttention": 1,
    }
    assert not engine.functions
    assert {opset.domain for opset in engine.opset_import} == {"", "com.microsoft"}


def test_other_attention_stays_as_it_is() -> None:
    """The text layer's causal, grouped attention is ONNX's own operator, which the fused kernel cannot replace."""
    node = helper.make_node("Attention", ["q", "k", "v"], ["mixed"], is_causal=1, scale=SIZE**-0.5)
    model = attention_model("rows")
    del model.graph.node[:], model.functions[:]
    model.graph.node.append(node)
    engine = lower(model)
    assert [(n.domain, n.op_type) for n in engine.graph.node] == [("", "Attention")]
    query, key, value = (torch.randn(1, HEADS, 9, SIZE) for _ in range(3))
    scores = (query.double() @ key.double().transpose(2, 3) * SIZE**-0.5).masked_fill(
        torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf
    )
    wanted = torch.softmax(scores, dim=-1) @ value.double()
    assert (run(engine, query, key, value).double() - wanted).abs().max() < 2e-6


def test_a_head_count_that_is_not_fixed_is_refused() -> None:
    with pytest.raises(LoweringError, match=r"attention query q: .* fixed heads and size expected, found \[1, None"):
        lower(attention_model("rows", heads="heads"))


def test_an_engine_that_lost_its_fused_attention_is_refused() -> None:
    model = attention_model("rows")
    unfused = onnx.inliner.inline_local_functions(model)
    with pytest.raises(LoweringError, match="1 fused attentions expected, 0 found"):
        check(unfused, model)


def test_an_engine_with_other_inputs_is_refused() -> None:
    model = attention_model("rows")
    engine = lower(model)
    model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, [1]))
    with pytest.raises(LoweringError, match=r"inputs \['q', 'k', 'v', 'mask'\] expected"):
        check(engine, model)


PEAK = """
import sys
import numpy, onnxruntime
def peak():
    # Not ru_maxrss: a child starts with its parent's.
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
options = onnxruntime.SessionOptions()
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
rows = numpy.ones((1, 8, int(sys.argv[2]), 128), numpy.float32)
before = peak()
session.run(None, {name: rows for name in "qkv"})
print((peak() - before) / 1024)
"""


def peak(file: Path, rows: int) -> float:
    """MiB by which one run raises the peak memory of a fresh process."""
    command = [sys.executable, "-c", PEAK, str(file), str(rows)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_memory_of_the_lowered_attention_does_not_grow_with_the_square_of_the_rows(tmp_path: Path) -> None:
    rows = 3000
    scores = 8 * rows**2 * 4 / 2**20
    linear = 8 * rows * 128 * 4 / 2**20
    lowered, plain = tmp_path / "lowered.onnx", tmp_path / "plain.onnx"
    lowered.write_bytes(lower(attention_model("rows")).SerializeToString())
    plain.write_bytes(attention_model("rows").SerializeToString())
    assert peak(plain, rows) > scores
    # Query, key, value and result in both orders of axes at most, and the kernel's working memory.
    assert peak(lowered, rows) < 10 * linear < scores / 2
