"""What a plan must hold is read from the emitted model, and lowering keeps what tells TensorRT how to build it."""

from __future__ import annotations

import onnx
import pytest
from onnx import parser

from engines.backends.tensorrt.expectation import expected
from engines.backends.tensorrt.lowering import PLUGINS, lower
from export.emit import attach_functions
from plugins.op import DOMAIN
from tests.tensorrt.requests import attention, model


def fp8_linear() -> onnx.ModelProto:
    """Two quantised linear layers with their function, and a plain one."""
    source = model(
        "g (bfloat16[rows, 8] x, float8e4m3fn[8, 8] w, float[8] s, bfloat16[8, 8] v) => (bfloat16[rows, 8] y)"
        " { [first] a = h3.fp8_linear (x, w, s)  [second] b = h3.fp8_linear (a, w, s)  [plain] y = MatMul (b, v) }"
    )
    attach_functions(source)
    return source


def test_quantised_linears_must_be_products_of_their_type() -> None:
    found = expected(fp8_linear())
    assert sorted(found.matmul_nodes.values()) == ["BFloat16", "FP8", "FP8"]
    assert found.matmul_nodes["plain"] == "BFloat16"


def test_a_quantised_linear_without_such_a_product_is_an_error() -> None:
    """Else a function that has changed would no longer be checked for."""
    source = fp8_linear()
    plain = parser.parse_function(
        f'<opset_import: ["" : 23], domain: "{DOMAIN}"> fp8_linear (x, w, s) => (result) {{ result = Identity (x) }}'
    )
    source.functions[0].CopyFrom(plain)
    with pytest.raises(ValueError, match="2 matrix products of quantised operands expected, of first, second; 0 found"):
        expected(source)


@pytest.mark.parametrize(
    ("dtype", "decomposable", "fused"), [("bfloat16", 0, 1), ("float", 0, 1), ("bfloat16", 1, 0), ("float", 1, 0)]
)
def test_an_attention_must_be_fused_unless_the_model_lets_it_fall_apart(
    dtype: str, decomposable: int, fused: int
) -> None:
    assert len(expected(attention(dtype, 4, 64, decomposable)).attention_nodes) == fused


@pytest.mark.parametrize(("dtype", "fused"), [("bfloat16", 1), ("float", 0)])
def test_a_standard_attention_must_be_fused_unless_it_is_float32(dtype: str, fused: int) -> None:
    shape = f"{dtype}[1, 4, rows, 64]"
    source = model(f"g ({shape} q, {shape} k, {shape} v) => ({shape} y) {{ [attend] y = Attention (q, k, v) }}")
    assert len(expected(source).attention_nodes) == fused


def test_collectives_and_plugins_are_expected() -> None:
    source = model(
        "g (float[rows, 8] x) => (float[rows, 8] y)"
        ' { [swap] a = h3.DistCollective <collective_operation = "all_to_all", reduce_op = "none", root = -1,'
        " nb_rank = 4> (x)  [window] y = h3.modulated_rms_norm (a) }"
    )
    found = expected(source, plugins=("modulated_rms_norm",))
    assert (found.collective_nodes, found.plugins) == (("swap",), ("modulated_rms_norm",))


def sage_attention() -> onnx.ModelProto:
    """SAGE attention with its function."""
    heads = "bfloat16[1, 4, rows, 128]"
    numbers = ", ".join(f"{name}: int = 64" for name in ("query_block", "key_block", "query_tile", "key_tile"))
    source = model(
        f"g ({heads} q, {heads} k, {heads} v, int64[1] n, float[1] t) => ({heads} y, int64[1, 4] c)"
        f" {{ y, c = h3.sage_attention <scale: float = 0.1, {numbers}> (q, k, v, n, t) }}"
    )
    attach_functions(source)
    return source


def test_an_attention_without_a_native_layer_stays_one_node_that_says_which_plugin_it_is() -> None:
    (node,) = lower(sage_attention(), PLUGINS).graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert (node.domain, node.op_type) == ("h3", "sage_attention")
    assert (attributes["plugin_namespace"], attributes["plugin_version"]) == (b"h3", b"1")
    assert attributes["key_block"] == 64
    assert expected(sage_attention(), PLUGINS).plugins == ("sage_attention",)
    # Where there are no plugins it is its function.
    assert "sage_attention" not in {node.op_type for node in lower(sage_attention()).graph.node}


def exchange() -> onnx.ModelProto:
    """Rows exchanged for heads among two ranks, with its functions."""
    part = "bfloat16[local_rows, 8, 128]"
    heads = "bfloat16[rows, 4, 128]"
    source = model(
        f"g ({part} query, {part} key, {part} value, int64[rows] sequence, int64[1] group)"
        f" => ({heads} a, {heads} b, {heads} c)"
        " { [node_exchange] a, b, c = h3.ulysses_all_to_all <ranks: int = 2> (query, key, value, sequence, group) }"
    )
    attach_functions(source)
    return source


@pytest.mark.parametrize("plugins", [(), PLUGINS])
def test_a_plan_takes_no_handle_of_a_group(plugins: tuple[str, ...]) -> None:
    lowered = lower(exchange(), plugins)
    names = ["query", "key", "value", "sequence"]
    assert [value.name for value in lowered.graph.input] == names
    assert all("group" not in node.input for node in lowered.graph.node)
    found = expected(exchange(), plugins)
    assert found.plugins == (("ulysses_all_to_all",) if plugins else ())
    assert len(found.collective_nodes) == (0 if plugins else 1)
    if plugins:
        assert list(lowered.graph.node[0].input) == names


def test_lowering_leaves_native_operators_with_their_attributes_and_names_every_node_once() -> None:
    source = attention("bfloat16", 4, 64, decomposable=1)
    source.MergeFrom(onnx.ModelProto())
    attach_functions(source)
    lowered = lower(source)
    (node,) = lowered.graph.node
    assert (node.domain, node.op_type, node.name) == ("h3", "Attention", "attend")
    assert {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}["TRT_decomposable"] == 1

    names = [node.name for node in lower(fp8_linear()).graph.node]
    assert all(names)
    assert len(set(names)) == len(names) > 30
    assert not any(node.domain for node in lower(fp8_linear()).graph.node)
