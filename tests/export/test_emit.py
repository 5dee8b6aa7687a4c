"""Emitted models: right against eager at every trial size, free of weights and of float64, named as declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto
from tiny_graph import graph_of, store
from torch import nn

from export.binding import BindingError
from export.checkpoint import Stored, Weight
from export.compare import CompareError
from export.emit import EmitError, Emitted, compare, emit
from export.graphs.graph import Axis
from export.passes.name_tensors import DeclarationError
from export.passes.widen import widen

F32, BF16 = torch.float32, torch.bfloat16
SEGMENTS = ("block.project", "block.attend", "block.finish")
NAMES = ("context", "modulation.time", "modulation.adaln", "prologue", "block", *SEGMENTS, "epilogue")

# Every graph in the release's layout, in bfloat16 too where it has parts that `block` has not, and the block in the
# other layouts.
MATRIX = [("native", name, F32) for name in NAMES] + [("native", name, BF16) for name in NAMES if name != "context"]
MATRIX += [("native-stacked", "block", F32), ("diffusers", "block", F32)]
MATRIX += [("diffusers", "block.project", F32)]

Emit = Callable[[str, str, torch.dtype], Emitted]


@pytest.mark.parametrize(("layout", "name", "compute"), MATRIX)
def test_onnxruntime_agrees_with_eager_on_first_and_last_instance(
    emit_denoiser: Emit, layout: str, name: str, compute: torch.dtype
) -> None:
    emitted = emit_denoiser(layout, name, compute)
    for instance in {0, len(emitted.bindings) - 1}:
        result = compare(emitted, instance)
        assert result.worst <= 1e-5
        assert len(result.differences) == len(emitted.graph.trials) * len(emitted.graph.outputs)


@pytest.mark.parametrize(("layout", "name", "compute"), MATRIX)
def test_trials_cover_two_sizes_of_each_axis(emit_denoiser: Emit, layout: str, name: str, compute: torch.dtype) -> None:
    graph = emit_denoiser(layout, name, compute).graph
    for spec in graph.inputs:
        for axis in (d for d in spec.shape if isinstance(d, Axis)):
            assert len({trial[axis.name] for trial in graph.trials}) >= 2


@pytest.mark.parametrize(("layout", "name", "compute"), MATRIX)
def test_weights_are_inputs_in_the_files_dtype_and_nothing_else_is_data(
    emit_denoiser: Emit, layout: str, name: str, compute: torch.dtype
) -> None:
    emitted = emit_denoiser(layout, name, compute)
    graph = emitted.model.graph
    assert [i.name for i in graph.input] == [s.name for s in emitted.graph.inputs] + list(emitted.weight_names)
    types = {i.name: i.type.tensor_type.elem_type for i in graph.input}
    for weight in emitted.weight_names:
        stored = emitted.bindings[0][weight].dtype
        assert types[weight] == {F32: TensorProto.FLOAT, BF16: TensorProto.BFLOAT16}[stored]
    # Shape arithmetic, and the 32 sinusoid frequencies of the small time embedding.
    assert sum(i.ByteSize() for i in graph.initializer) < 1500
    assert len(emitted.model.SerializeToString()) < 30_000


def test_weight_inputs_are_named_by_their_keys_without_what_instances_differ_in(emit_denoiser: Emit) -> None:
    emitted = emit_denoiser("native", "block", F32)
    assert "attn.qkv_proj.weight" in emitted.weight_names
    assert len(emitted.bindings) == 3
    assert emitted.bindings[2]["attn.qkv_proj.weight"].key == "blocks.2.attn.qkv_proj.weight"
    head = emit_denoiser("native", "modulation.adaln", F32)
    assert head.weight_names == ("adaln_proj.linear.weight", "adaln_proj.linear.bias")
    assert head.bindings[3]["adaln_proj.linear.weight"].key == "final_layer.adaln_proj.linear.weight"
    assert "final_layer.norm.weight" in emit_denoiser("native", "epilogue", F32).weight_names


def test_one_adaln_graph_serves_blocks_and_head_by_a_named_axis(emit_denoiser: Emit) -> None:
    emitted = emit_denoiser("native", "modulation.adaln", BF16)
    output = emitted.model.graph.output[0].type.tensor_type.shape.dim
    assert (output[0].dim_value, output[1].dim_param) == (4, "features")
    assert emitted.bindings[0]["adaln_proj.linear.weight"].shape[0] == 18 * 80
    assert emitted.bindings[-1]["adaln_proj.linear.weight"].shape[0] == 2 * 80


def test_block_uses_the_registry_and_never_reshapes_a_weight(emit_denoiser: Emit) -> None:
    for layout in ("native", "native-stacked", "diffusers"):
        emitted = emit_denoiser(layout, "block", F32)
        assert emitted.census["h3::Attention"] == 1
        assert emitted.census["h3::modulated_rms_norm"] == 2
        assert emitted.census["h3::norm_rotary"] == 2
        assert emitted.census["h3::gated_residual"] == 2
        assert emitted.census["h3::swiglu"] == 1
        functions = ["Attention", "gated_residual", "modulated_rms_norm", "norm_rotary", "swiglu"]
        assert sorted(f.name for f in emitted.model.functions) == functions
        users = [n for n in emitted.model.graph.node if set(n.input) & set(emitted.weight_names)]
        assert {n.op_type for n in users} <= {"Cast", "Gemm", "MatMul", "modulated_rms_norm", "norm_rotary"}


def test_attention_may_be_decomposed_only_where_no_fused_kernel_exists(emit_denoiser: Emit) -> None:
    for compute, expected in ((F32, 1), (BF16, 0)):
        emitted = emit_denoiser("native", "block", compute)
        (node,) = [n for n in emitted.model.graph.node if n.op_type == "Attention"]
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes["TRT_decomposable"] == expected
        assert attributes["scale"] == pytest.approx(128**-0.5)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("prologue", ("video_patch_proj.weight", "audio_patch_proj.weight")),
        ("modulation.time", ("time_embedder.proj_in.weight", "time_embedder.proj_out.weight")),
        ("epilogue", ("final_layer.video_out.weight", "final_layer.audio_out.weight")),
    ],
)
def test_float32_islands_stay_float32_in_a_bfloat16_graph(
    emit_denoiser: Emit, name: str, weights: tuple[str, ...]
) -> None:
    model = onnx.shape_inference.infer_shapes(emit_denoiser("native", name, BF16).model, data_prop=True)
    graph = model.graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    for weight in weights:
        (node,) = [n for n in graph.node if weight in n.input]
        assert node.op_type == "Gemm"
        assert {types[n] for n in (*node.input, *node.output)} == {TensorProto.FLOAT}


def test_matrix_products_of_a_bfloat16_block_are_bfloat16(emit_denoiser: Emit) -> None:
    emitted = emit_denoiser("native", "block", BF16)
    graph = onnx.shape_inference.infer_shapes(emitted.model, data_prop=True).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    products = [n for n in graph.node if n.op_type == "Gemm"]
    assert len(products) == 4
    assert {types[name] for n in products for name in (*n.input, *n.output)} == {TensorProto.BFLOAT16}


def test_widened_model_has_no_bfloat16_and_leaves_the_original_alone(emit_denoiser: Emit) -> None:
    model = emit_denoiser("native", "block", BF16).model
    before = model.SerializeToString()
    wide = widen(model)
    onnx.checker.check_model(wide, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(wide, strict_mode=True, data_prop=True).graph
    values = (*inferred.input, *inferred.output, *inferred.value_info)
    assert TensorProto.BFLOAT16 not in {v.type.tensor_type.elem_type for v in values}
    assert model.SerializeToString() == before


def test_compare_fails_on_a_model_that_computes_something_else(emit_denoiser: Emit) -> None:
    for compute in (F32, BF16):
        emitted = emit_denoiser("native", "block", compute)
        wrong = onnx.ModelProto()
        wrong.CopyFrom(emitted.model)
        (node,) = [n for n in wrong.graph.node if n.op_type == "Attention"]
        next(a for a in node.attribute if a.name == "scale").f *= 1.05
        with pytest.raises(CompareError, match="graph block, output hidden_out"):
            compare(replace(emitted, model=wrong))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def linear_weights(directory: Path) -> dict[str, Stored]:
    """Equal matrices and all-zero biases: what optimisers like to merge and to drop."""
    tensors = {f"{layer}.weight": torch.eye(4) for layer in ("first", "second")}
    return store(tensors | {f"{layer}.bias": torch.zeros(4) for layer in ("first", "second")}, directory / "w")


def test_equal_and_zero_weights_keep_their_own_inputs(tmp_path: Path) -> None:
    emitted = emit(graph_of(Linear, linear_weights(tmp_path)))
    assert len(emitted.weight_names) == 4
    read = {name for node in emitted.model.graph.node for name in node.input}
    assert read >= set(emitted.weight_names)
    assert compare(emitted).worst == 0


def test_axes_with_a_divisor_are_dynamic_under_their_own_name(tmp_path: Path) -> None:
    rows = Axis("pixels", 8, 800, multiple=8)
    emitted = emit(graph_of(Linear, linear_weights(tmp_path), rows=rows))
    shape = emitted.model.graph.input[0].type.tensor_type.shape
    assert shape.dim[0].dim_param == "pixels"
    assert compare(emitted).worst == 0


def test_parameter_cut_from_a_fused_tensor_is_cut_inside_the_graph(tmp_path: Path) -> None:
    stored = store({"fused": torch.randn(12, 4), "bias": torch.randn(8)}, tmp_path / "w")
    per_head = stored["fused"].view(2, 3, 2, 4)
    weights: dict[str, Weight] = {
        "first.weight": per_head.select(1, 0).view(4, 4),
        "second.weight": Weight.concat([stored["fused"].rows(10, 12), stored["fused"].rows(0, 2)]),
        "first.bias": stored["bias"].rows(0, 4),
        "second.bias": stored["bias"].rows(4, 8),
    }
    emitted = emit(graph_of(Linear, weights))
    assert emitted.weight_names == ("fused", "bias")
    assert compare(emitted).worst < 1e-6


def test_float64_is_refused(tmp_path: Path) -> None:
    class Double(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).double().cumsum(0).float()

    with pytest.raises(EmitError, match="float64"):
        emit(graph_of(Double, linear_weights(tmp_path)))


def test_captured_weight_is_refused(tmp_path: Path) -> None:
    captured = torch.randn(4, 40_000)

    class Capturing(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) @ captured)[:, :4]

    with pytest.raises(EmitError, match="constants of weight size"):
        emit(graph_of(Capturing, linear_weights(tmp_path)))


def test_parameters_without_weights_and_weights_without_parameters_are_named(tmp_path: Path) -> None:
    weights = linear_weights(tmp_path)
    weights["third.weight"] = weights.pop("second.weight")
    with pytest.raises(BindingError, match=r"\['second.weight'\].*\['third.weight'\]"):
        emit(graph_of(Linear, weights))


def test_weight_of_another_shape_than_the_parameter_is_named(tmp_path: Path) -> None:
    weights = linear_weights(tmp_path)
    odd = store({"odd": torch.zeros(3, 4)}, tmp_path / "odd")["odd"]
    with pytest.raises(BindingError, match=r"first.weight: expected \[4, 4\], found \[3, 4\] in odd"):
        emit(graph_of(Linear, weights | {"first.weight": odd}))


def test_instance_with_another_shape_is_named(tmp_path: Path) -> None:
    weights = linear_weights(tmp_path)
    odd = store({"b.first.weight": torch.zeros(3, 4)}, tmp_path / "odd")["b.first.weight"]
    with pytest.raises(BindingError, match=r"instance 1.*b.first.weight: expected .*\[4, 4\], found .*\[3, 4\]"):
        emit(graph_of(Linear, weights, weights | {"first.weight": odd}))


def test_outputs_that_are_not_as_declared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="y: declared"):
        emit(graph_of(Linear, linear_weights(tmp_path), out=5))
