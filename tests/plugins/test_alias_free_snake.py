"""The alias-free activation against diffusers' module, and its ONNX body against float64."""

from __future__ import annotations

import onnx
import onnxruntime
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import (
    MiniMaxH3AudioActivation1d,
    MiniMaxH3AudioSnakeBeta,
)
from onnx import TensorProto, helper

from plugins.op import DOMAIN, DOMAIN_VERSION, ONNX_OPSET
from plugins.ops.alias_free_snake import OP, reference

CHANNELS = 5
NAMES = ("x", "alpha", "beta", "upsampling", "downsampling")


def arguments(length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Random inputs; the filters are not symmetric, so that a reversed one is seen."""
    torch.manual_seed(length)
    shapes = ((2, CHANNELS, length), (CHANNELS,), (CHANNELS,), (1, 1, 12), (1, 1, 12))
    return tuple(torch.randn(shape, dtype=dtype) * (0.5 if shape == (1, 1, 12) else 1) for shape in shapes)


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_reference_is_the_upstream_activation(length: int) -> None:
    x, alpha, beta, upsampling, downsampling = arguments(length, torch.float64)
    module = MiniMaxH3AudioActivation1d(MiniMaxH3AudioSnakeBeta(CHANNELS)).double()
    values = {"act.alpha": alpha, "act.beta": beta, "upsample.filter": upsampling}
    module.load_state_dict(values | {"downsample.lowpass.filter": downsampling})
    torch.testing.assert_close(reference(x, alpha, beta, upsampling, downsampling), module(x))


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_onnx_body_is_the_reference(length: int) -> None:
    wide = arguments(length, torch.float64)
    session = onnxruntime.InferenceSession(model().SerializeToString())
    feeds = {name: tensor.float().numpy() for name, tensor in zip(NAMES, wide, strict=True)}
    (found,) = session.run(None, feeds)
    expected = reference(*(torch.from_numpy(feeds[name]).double() for name in NAMES))
    # Sums of 24 float32 products of about 10, and a sine whose argument has their rounding.
    assert (torch.from_numpy(found) - expected).abs().max() < 1e-5 * expected.abs().max()


def model() -> onnx.ModelProto:
    """One node of the operator, with its body, any length."""
    shapes: list[list[str | int | None]] = [[2, CHANNELS, "length"], [CHANNELS], [CHANNELS], [1, 1, 12], [1, 1, 12]]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip(NAMES, shapes, strict=True)]
    output = helper.make_tensor_value_info("result", TensorProto.FLOAT, shapes[0])
    graph = helper.make_graph([helper.make_node(OP.name, NAMES, ["result"], domain=DOMAIN)], "one", inputs, [output])
    opsets = [helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    made = helper.make_model(graph, functions=[OP.function()], opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made
