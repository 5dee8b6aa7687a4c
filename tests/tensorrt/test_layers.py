"""Layers are read from what TensorRT says in both of its notations; nothing that is not understood is passed over."""

from __future__ import annotations

import json

import pytest

from engines.layers import Layer, LayersError, LayerTensor, census, read_build_log, read_inspector

FORMAT = "Format: (Linear) Row major linear format"
PRODUCT = (
    "Name: node_linear_myl0_3, LayerType: gemm, Inputs: [ { Name: x, Dimensions: [-1,8], Strides: [8,1], "
    f"StrideOrder: [1,0], Datatype: FP8, {FORMAT} }}, {{ Name: w, Dimensions: [8,4], Strides: [1,8], "
    "StrideOrder: [0,1], Datatype: FP8, Format: (Arbitrary) Format with stride order = [0,1] }], Constants: [ "
    f"{{ Name: alpha, Dimensions: [], Strides: [], StrideOrder: [], Datatype: Float, {FORMAT} }}], Outputs: [ {{ "
    f"Name: {{ForeignNode[a...b]}}, Dimensions: [-1,4], Strides: [4,1], StrideOrder: [1,0], Datatype: Float, {FORMAT} "
    "}], TacticName: __myelin_CASK_STUB, StreamId: 0, Metadata: [ONNX Layer: one]\x1f[ONNX Layer: two | three (call)]"
)
"""A line of TensorRT-RTX 1.7's builder, shortened."""

OLDER = (
    "Name: __myl_Conv, LayerType: kgen, Inputs: [ { Name: ids, Dimensions: [1,40], Format/Datatype: Int32 }], "
    "Outputs: [ { Name: out, Dimensions: [1,40], Format/Datatype: Half }], TacticName: t, StreamId: 0, Metadata: "
)
"""TensorRT 10's notation, as in https://github.com/NVIDIA/TensorRT/issues/4397."""

WAIT = "Name: w0, LayerType: wait, Inputs: [], Outputs: [], TacticName: , StreamId: 1, EventId: 2, Metadata: "


def log(*lines: str) -> str:
    return "Layers:\n" + "\n".join(lines) + "\n\nI/O Tensors:\n Name: x, IOMode: Input\n"


def layer(name: str, kind: str, *dtypes: str, tactic: str = "") -> Layer:
    tensors = tuple(LayerTensor(name="t", dtype=dtype, shape=(1,)) for dtype in dtypes)
    return Layer(name=name, kind=kind, inputs=tensors, outputs=(), tactic=tactic)


def test_a_line_of_the_builders_log_is_read_whole() -> None:
    (read,) = read_build_log(log(PRODUCT))
    assert read == Layer(
        name="node_linear_myl0_3",
        kind="gemm",
        inputs=(LayerTensor(name="x", dtype="FP8", shape=(-1, 8)), LayerTensor(name="w", dtype="FP8", shape=(8, 4))),
        constants=(LayerTensor(name="alpha", dtype="Float", shape=()),),
        outputs=(LayerTensor(name="{ForeignNode[a...b]}", dtype="Float", shape=(-1, 4)),),
        tactic="__myelin_CASK_STUB",
        origins=("one", "two | three (call)"),
    )
    assert read.outputs[0].nbytes(dynamic=100) == 100 * 4 * 4


def test_older_notation_and_layers_without_tensors_are_read() -> None:
    older, wait = read_build_log("text before\n" + log(OLDER, WAIT))
    assert [t.dtype for t in (*older.inputs, *older.outputs)] == ["Int32", "Half"]
    assert (wait.kind, wait.inputs, wait.origins) == ("wait", (), ())


def test_a_log_survives_json() -> None:
    layers = read_build_log(log(PRODUCT, OLDER, WAIT))
    assert tuple(Layer.model_validate_json(each.model_dump_json()) for each in layers) == layers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no layers here", 'no "Layers:" message'),
        ("a Layers:\n", 'no "Layers:" message'),
        (log("Layer(Myelin): something"), "not a line about a layer: 'Layer"),
        (log(PRODUCT.replace("LayerType", "Kind")), "not a line about a layer"),
        (log(PRODUCT.replace("Outputs: [", "Outputs: ")), "not a line about a layer"),
        (log(PRODUCT.replace("Datatype: FP8", "Datatype: FP3", 1)), "'FP3': not a data type; known: Float"),
        (log(PRODUCT.replace("Dimensions: [-1,8]", "Dimensions: [?,8]")), "not a tensor"),
        (log(PRODUCT.replace("{ Name: w, Dimensions", "{ Nome: w, Dimensions")), "not a tensor"),
    ],
)
def test_what_is_not_understood_is_an_error(text: str, said: str) -> None:
    with pytest.raises(LayersError) as failed:
        read_build_log(text)
    assert said in str(failed.value)


def inspected(**changes: object) -> dict[str, object]:
    """A layer as IEngineInspector's JSON has it."""
    tensor = {"Name": "x", "Dimensions": [-1, 8], "Datatype": "BFloat16", "Format": "Row major linear"}
    return {
        "Name": "_gemm_mha_v2_myl0_6",
        "LayerType": "kgen",
        "Inputs": [tensor, tensor],
        "Outputs": [{"Name": "y", "Dimensions": [4], "Format/Datatype": "Row major linear FP16 format"}],
        "TacticName": "_gemm_mha_v2_0x0a",
        "StreamId": 0,
        "Metadata": "[ONNX Layer: node_attention]",
        **changes,
    }


def test_the_inspectors_json_is_read() -> None:
    (read,) = read_inspector(json.dumps({"Layers": [inspected()], "Bindings": ["x", "y"]}))
    assert read.census_kind == "attention.fused"
    assert read.origins == ("node_attention",)
    assert [t.dtype for t in (*read.inputs, *read.outputs)] == ["BFloat16", "BFloat16", "Half"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "not the JSON of an engine inspector"),
        ("half a li", "not the JSON of an engine inspector"),
        (json.dumps({"Layers": ["node_linear"]}), "a layer's name alone"),
        (json.dumps({"Layers": [{"Name": "x"}]}), "not a layer of an engine inspector"),
        (json.dumps({"Layers": [inspected(Outputs=[{"Name": "y", "Dimensions": [1], "Datatype": "Odd"}])]}), "'Odd'"),
    ],
)
def test_what_is_not_an_inspectors_json_is_an_error(text: str, said: str) -> None:
    with pytest.raises(LayersError) as failed:
        read_inspector(text)
    assert said in str(failed.value)


@pytest.mark.parametrize(
    ("counted", "kind"),
    [
        (layer("_gemm_mha_v2_myl0_6", "kgen", "BFloat16", "BFloat16", "BFloat16"), "attention.fused"),
        (layer("node_linear_myl0_3", "gemm", "FP8", "FP8", "Float"), "gemm.FP8"),
        (layer("__myl_FcMulAdd_myl0_7", "runtime_fusion", "BFloat16", "Float", "BFloat16"), "gemm.BFloat16"),
        (layer("node_linear", "gemm", "FP8", "BFloat16"), "gemm.mixed"),
        (layer("__myl_ReshCastMul_myl0_2", "kgen", "Float", "Float"), "kgen"),
        (layer("__myl_CorrAdd_myl0_9", "runtime_fusion", "Float", "Float"), "runtime_fusion"),
        (layer("swap_myl0_1", "comm_alltoall", "Float"), "collective.all_to_all"),
        (layer("join", "comm_allgather", "Float"), "collective.all_gather"),
        (layer("node", "PluginV3", "Half", tactic="window"), "plugin.window"),
    ],
)
def test_layers_are_counted_by_what_they_do(counted: Layer, kind: str) -> None:
    assert census([counted, counted]) == {kind: 2}
