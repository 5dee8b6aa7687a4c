"""The ops as plugins: registered with TensorRT's own registry (its lean runtime's, of the same version), and run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorrt_lean_bindings as trt
import torch

from engines.backends.tensorrt.builder import register_plugins
from engines.backends.tensorrt.lowering import PLUGIN_VERSION, PLUGINS
from engines.backends.tensorrt.request import Expected, PlanError, PlanRequest
from engines.tensorrt import Flavour
from plugins.exchanges import OPERATORS
from plugins.op import DOMAIN, Op
from plugins.ranks import Loopback, handle_of
from plugins.registry import REGISTRY, find
from plugins.tensorrt_plugin import VERSION, Exchange, PluginError, creator, exchanging, register, run

WITH_PLUGINS = [op for op in REGISTRY if op.plugin_shapes is not None]
EACH = pytest.mark.parametrize("op", WITH_PLUGINS, ids=lambda op: op.name)

NUMBERS = {"ranks": 2, "scale": 0.125, "query_block": 1, "key_block": 16, "query_tile": 64, "key_tile": 128}


@pytest.fixture
def registered() -> Any:
    """The registry with every creator; they are taken out again."""
    registry = trt.get_plugin_registry()
    creators: list[Any] = [creator(trt, op) for op in WITH_PLUGINS]
    assert all(registry.register_creator(one, one.plugin_namespace) for one in creators)
    yield registry
    for one in creators:
        registry.deregister_creator(one)


def make(registry: Any, op: Op, leave_out: str | None = None, phase: Any = trt.TensorRTPhase.BUILD) -> Any:
    kinds = {int: (np.int64, trt.PluginFieldType.INT64), float: (np.float32, trt.PluginFieldType.FLOAT32)}
    fields = [
        trt.PluginField(name, np.array([NUMBERS[name]], kinds[kind][0]), kinds[kind][1])
        for name, kind in op.attribute_types.items()
        if name != leave_out
    ]
    made = registry.get_creator(op.name, "1", "h3")
    return made.create_plugin(op.name, trt.PluginFieldCollection(fields), phase)


def test_builds_lower_to_plugins_what_is_one() -> None:
    assert set(PLUGINS) <= {op.name for op in WITH_PLUGINS}
    assert PLUGIN_VERSION == VERSION


def test_attention_ops_have_plugins() -> None:
    assert {op.name for op in WITH_PLUGINS} >= {
        "dense_attention",
        "skip_softmax_attention",
        "sage_attention",
        "video_sparse_attention",
    }


@EACH
def test_creator_is_found_by_name_version_and_namespace(op: Op, registered: Any) -> None:
    found = registered.get_creator(op.name, "1", "h3")
    assert [field.name for field in found.field_names] == list(op.attributes)


@EACH
def test_plugin_keeps_its_attributes_through_clone_and_serialisation(op: Op, registered: Any) -> None:
    plugin = make(registered, op).clone()
    saved = {field.name: np.asarray(field.data).item() for field in plugin.get_fields_to_serialize()}
    assert saved == {name: NUMBERS[name] for name in op.attributes}
    again = registered.get_creator(op.name, "1", "h3").create_plugin(
        op.name, plugin.get_fields_to_serialize(), trt.TensorRTPhase.BUILD
    )
    assert again.attributes == plugin.attributes


@EACH
def test_types_are_those_of_the_op(op: Op, registered: Any) -> None:
    plugin = make(registered, op)
    integers = ("valid_rows", "tile_rows", "row_tiles", "tile_counts", "skipped", "sequence")
    types = {"threshold": trt.DataType.FLOAT, **dict.fromkeys(integers, trt.DataType.INT64)}
    wanted = [types.get(name, trt.DataType.BF16) for name in (*op.tensors, *op.results)]
    described = [described_as(kind) for kind in wanted]
    inputs = len(op.tensors)
    assert all(plugin.supports_format_combination(i, described, inputs) for i in range(len(wanted)))
    assert plugin.get_output_data_types(wanted[:inputs]) == wanted[inputs:]
    described[1] = described_as(trt.DataType.FLOAT)
    assert not plugin.supports_format_combination(1, described, inputs)
    described[1] = described_as(trt.DataType.BF16, "CHW32")
    assert not plugin.supports_format_combination(1, described, inputs)
    assert plugin.num_outputs == len(op.results)


def described_as(kind: Any, form: str = "LINEAR") -> SimpleNamespace:
    return SimpleNamespace(desc=SimpleNamespace(type=kind, format=SimpleNamespace(name=form)))


EXCHANGING = pytest.mark.parametrize("op", [op for op in WITH_PLUGINS if op.exchanges], ids=lambda op: op.name)


def test_all_ops_that_exchange_between_ranks_have_plugins() -> None:
    assert {op.name for op in REGISTRY if op.exchanges} <= {op.name for op in WITH_PLUGINS}
    assert {op.name for op in REGISTRY if op.exchanges} == set(OPERATORS)


@EXCHANGING
def test_a_plan_that_is_opened_exchanges_over_what_its_opener_gives(op: Op) -> None:
    """Two plans, one process: each has its own; and clones, and what a context attaches, have the plan's."""
    registry = trt.get_plugin_registry()
    exchanges = Exchange(), Exchange()
    plugins = []
    for exchange in exchanges:
        with exchanging(trt, registry, [op], exchange):
            plugins.append(make(registry, op, phase=trt.TensorRTPhase.RUNTIME))
        assert registry.get_creator(op.name, VERSION, DOMAIN) is None
    for plugin, exchange in zip(plugins, exchanges, strict=True):
        assert plugin.clone().exchange is plugin.attach_to_context(None).exchange is exchange
    with pytest.raises(PluginError, match=f"plugin {op.name}: is run before the group is known"):
        plugins[0].enqueue([], [], [], [], 0, 0)


@EXCHANGING
def test_a_plan_is_not_opened_without_ranks_to_exchange_with(op: Op, registered: Any) -> None:
    with pytest.raises(PluginError, match=f"plugin {op.name}: exchanges between ranks, and is given none"):
        make(registered, op, phase=trt.TensorRTPhase.RUNTIME)


@EXCHANGING
def test_a_process_that_builds_plans_opens_them_to_look_at_them(op: Op, untouched: Any) -> None:
    register(trt, op.name, building=True)
    assert isinstance(make(untouched, op, phase=trt.TensorRTPhase.RUNTIME).exchange.group, Loopback)


@EXCHANGING
@pytest.mark.parametrize("ranks", [[2.5], [2, 4], []])
def test_ranks_that_are_no_number_are_refused(op: Op, registered: Any, ranks: list[float]) -> None:
    fields = trt.PluginFieldCollection([trt.PluginField("ranks", np.array(ranks), trt.PluginFieldType.FLOAT64)])
    made = registered.get_creator(op.name, VERSION, DOMAIN)
    with pytest.raises(PluginError, match=rf"plugin {op.name}: ranks = .*: must be one whole number"):
        made.create_plugin(op.name, fields, trt.TensorRTPhase.BUILD)


@EXCHANGING
def test_a_plan_that_is_built_sends_to_itself(op: Op, registered: Any) -> None:
    group = make(registered, op).exchange.group
    assert isinstance(group, Loopback)
    assert group.size == NUMBERS["ranks"]


class Size:
    """TensorRT's expression of a size: a number, or the name of what is known later."""

    def __init__(self, value: int | str) -> None:
        self.value = value

    def get_constant_value(self) -> int:
        assert isinstance(self.value, int)
        return self.value


def test_exchanges_turn_rows_into_heads_and_heads_into_rows() -> None:
    heads, rows = find("ulysses_all_to_all"), find("ulysses_all_to_all_back")
    assert heads.plugin_shapes is not None
    assert rows.plugin_shapes is not None
    local, whole, width = Size("n"), Size("S"), Size(128)
    part = [local, Size(56), width]
    assert heads.plugin_shapes([part, part, part, [whole]], {"ranks": 4}) == [[whole, 14, width]] * 3
    assert rows.plugin_shapes([[whole, Size(14), width], part], {"ranks": 4}) == [[local, 56, width]]
    for ranks in (0, 5):
        with pytest.raises(ValueError, match=f"56 heads cannot be shared by {ranks} ranks"):
            heads.plugin_shapes([part, part, part, [whole]], {"ranks": ranks})


def test_missing_attribute_is_named(registered: Any) -> None:
    op = next(op for op in WITH_PLUGINS if op.name == "sage_attention")
    with pytest.raises(PluginError, match="plugin sage_attention: attribute key_block is missing"):
        make(registered, op, leave_out="key_block")


@pytest.fixture
def untouched() -> Any:
    """The registry without ours, as it is left."""
    registry = trt.get_plugin_registry()
    register.cache_clear()
    yield registry
    for op in WITH_PLUGINS:
        if (found := registry.get_creator(op.name, VERSION, DOMAIN)) is not None:
            registry.deregister_creator(found)
    register.cache_clear()


def test_a_plugin_is_registered_once_however_often_it_is_asked_for(untouched: Any) -> None:
    assert untouched.get_creator("sage_attention", VERSION, DOMAIN) is None
    first = register(trt, "sage_attention")
    assert register(trt, "sage_attention") is first
    assert untouched.get_creator("sage_attention", VERSION, DOMAIN).name == "sage_attention"


def test_what_is_no_plugin_cannot_be_registered(untouched: Any) -> None:
    with pytest.raises(PluginError, match="op swiglu: has no plugin_shapes"):
        register(trt, "swiglu")
    assert register(trt, "skip_softmax_attention") is not None
    register.cache_clear()
    with pytest.raises(PluginError, match="registry does not take it as h3::skip_softmax_attention, version 1"):
        register(trt, "skip_softmax_attention")


def test_a_build_registers_what_its_model_needs(untouched: Any, tmp_path: Path) -> None:
    lean = Flavour("tensorrt", trt, str(trt.__version__))
    wanted = PlanRequest.model_construct(graph="block", expected=expectation("sage_attention", "sage_attention"))
    register_plugins(lean, wanted)
    assert untouched.get_creator("sage_attention", VERSION, DOMAIN) is not None
    assert untouched.get_creator("skip_softmax_attention", VERSION, DOMAIN) is None
    with pytest.raises(PlanError, match=r"graph block: .*h3::nothing is not in plugins\.registry"):
        register_plugins(lean, PlanRequest.model_construct(graph="block", expected=expectation("nothing")))


def expectation(*plugins: str) -> Expected:
    return Expected(attention_nodes=(), matmul_nodes={}, collective_nodes=(), plugins=plugins)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@EACH
def test_enqueue_on_a_gpu_is_the_torch_op(op: Op) -> None:
    given = {"valid_rows": torch.tensor([300], device="cuda"), "threshold": torch.zeros(1, device="cuda")}
    rows = torch.arange(320, device="cuda")
    given |= {"tile_rows": rows.view(5, 64), "row_tiles": rows // 64, "tile_counts": torch.tensor([1, 2]).cuda()}
    given |= {"x": torch.randn(320, 128, device="cuda"), "sequence": rows}
    # Rows before heads for what exchanges; a group that sends to itself is as good as another here.
    shape = (320, 2, 128) if op.exchanges else (1, 2, 320, 128)
    heads = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [given[name] if name in given else next(heads) for name in op.tensors]
    attributes = {name: NUMBERS[name] for name in op.attributes}
    group = Loopback(2) if op.exchanges else None
    handle = [torch.tensor([handle_of(group)])] if group else []
    # An op takes the handle behind all tensors.
    expected = op(*inputs, *handle, *attributes.values())
    expected = expected if isinstance(expected, tuple) else (expected,)
    outputs = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in expected]
    names = {torch.float32: "FLOAT", torch.bfloat16: "BF16", torch.int64: "INT64"}
    described = [SimpleNamespace(dims=x.shape, type=SimpleNamespace(name=names[x.dtype])) for x in (*inputs, *outputs)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    run(op, attributes, described, [x.data_ptr() for x in (*inputs, *outputs)], stream.cuda_stream, group)
    stream.synchronize()
    for found, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(found, wanted)
