"""What TensorRT-RTX does not take, by its own words, and where that is known upstream.

When one of these builds, a rewrite of ours may be given up.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from engines.backends.tensorrt.expectation import expected
from engines.backends.tensorrt.process import build_plan
from engines.backends.tensorrt.request import PlanError
from tests.tensorrt.requests import attention, model, request

NO_FUSED_KERNEL = (
    "decompose_composite_ops.cpp:59: CHECK(composite_op->is_decomposable()) failed. "
    "Attention operation was not supported by a dedicated kernel."
)
"""https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/transformers-fused-attention.html: an
IAttention is not decomposable unless it says so, and then fails where no fused kernel has its type and shape."""

NO_BFLOAT16_DECONVOLUTION = "infer_type] Could not infer output types for operation:"
"""https://github.com/NVIDIA/TensorRT/issues/4829 and https://github.com/NVIDIA/TensorRT-Incubator/issues/565: there is
no transposed convolution of bfloat16, for which the audio decoder stays float32."""

NO_SCALE_BY_ROW = "node quantise (QuantizeLinear): Invalid Node - quantise"
"""https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/inference-library/work-quantized-types.html: scales are by
tensor, by channel or by block, not by row of what is computed; ours by row are multiplied after the product instead."""

NO_SUCH_OPERATOR = (
    'node odd (Nothing): creator && "Plugin not found, are the plugin name, version, and namespace correct?"'
)
"""https://github.com/onnx/onnx-tensorrt/issues/800: an operator that the parser does not know is looked for among the
plugins, of which TensorRT-RTX has none."""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param(attention("float", 4, 64, decomposable=0), NO_FUSED_KERNEL, id="float32 attention"),
        pytest.param(attention("bfloat16", 1, 64, decomposable=0), NO_FUSED_KERNEL, id="attention of one head"),
        pytest.param(attention("bfloat16", 4, 512, decomposable=0), NO_FUSED_KERNEL, id="attention of size 512"),
        pytest.param(
            model(
                "g (bfloat16[1, 8, rows] x, bfloat16[8, 8, 4] w) => (bfloat16[1, 8, samples] y)"
                " { [up] y = ConvTranspose <strides = [2]> (x, w) }"
            ),
            NO_BFLOAT16_DECONVOLUTION,
            id="bfloat16 transposed convolution",
        ),
        pytest.param(
            model(
                "g (float[rows, 64] x, float[rows] s) => (float[rows, 64] y)"
                " { [quantise] a = QuantizeLinear <axis = 0, output_dtype = 17> (x, s)"
                "   [back] y = DequantizeLinear <axis = 0> (a, s) }"
            ),
            NO_SCALE_BY_ROW,
            id="quantisation by row",
        ),
        pytest.param(
            model("g (float[rows, 8] x) => (float[rows, 8] y) { [odd] y = Nothing (x) }"),
            NO_SUCH_OPERATOR,
            id="an operator of nobody's",
        ),
    ],
)
def test_a_graph_that_tensorrt_rtx_does_not_take_is_refused_in_its_words(
    source: onnx.ModelProto, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as refused:
        build_plan(request(source, tmp_path), tmp_path / "plan")
    assert str(refused.value).startswith("graph sample: ")
    assert reason in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx"]


def test_datacentre_gpus_are_not_built_for(tmp_path: Path) -> None:
    source = model("g (float[rows, 8] x) => (float[rows, 8] y) { y = Relu (x) }")
    with pytest.raises(PlanError, match=r"does not build for compute capability 9\.0; it builds for .*SM120"):
        build_plan(request(source, tmp_path, capabilities=("9.0",)), tmp_path / "plan")


def test_plugins_are_not_asked_of_tensorrt_rtx(tmp_path: Path) -> None:
    """Its parser ends the process at a node that names a plugin which is registered."""
    source = model("g (float[rows, 8] x) => (float[rows, 8] y) { [w] y = h3.window (x) }")
    asked = request(source, tmp_path, expected=expected(source, plugins=("window",)))
    with pytest.raises(PlanError, match="tensorrt_rtx has no plugins, which window would need"):
        build_plan(asked, tmp_path / "plan")


def test_too_little_workspace_is_told_by_the_name_of_its_limit(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"workspace_bytes = 1,024: must be at least"):
        build_plan(request(attention("float", 4, 64, 1), tmp_path, workspace_bytes=1024), tmp_path / "plan")
