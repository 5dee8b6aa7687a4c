"""What quantises rows where they are made says the same in torch, in float64 and as an ONNX function."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from plugins.op import DOMAIN, DOMAIN_VERSION, ONNX_OPSET, Op
from plugins.ops import modulated_rms_norm, quantised_rows, swiglu

ROWS, WIDTH = 7, 48
EPS = 1e-5


def drawn(op: Op, dtype: torch.dtype) -> tuple[tuple[object, ...], torch.Tensor]:
    """Arguments, a row of which is zeros, and the exact rows in float64 that are to be quantised."""
    generator = torch.Generator().manual_seed(6)
    x, other = (torch.randn(ROWS, WIDTH, generator=generator).to(dtype) for _ in range(2))
    x[3] = 0
    if op is quantised_rows.ROWS:
        return (x,), x.double()
    if op is quantised_rows.SWIGLU:
        return (x, other), swiglu.reference(x.double(), other.double())
    weight, scale, shift = (torch.randn(n, WIDTH, generator=generator).to(dtype) for n in (1, 5, 5))
    index = torch.randint(5, (ROWS,), generator=generator)
    wide = (each.double() for each in (x, weight[0], scale, shift))
    return (x, weight[0], scale, shift, index, EPS), modulated_rms_norm.reference(*wide, index, EPS)


OPS = pytest.mark.parametrize(
    "op", [quantised_rows.ROWS, quantised_rows.SWIGLU, quantised_rows.NORM], ids=lambda op: op.name
)


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_their_largest_value_at_448_and_are_rounded_once(op: Op, dtype: torch.dtype) -> None:
    arguments, exact = drawn(op, dtype)
    values, scale = op(*arguments)
    assert torch.allclose(scale.double(), (exact.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-30), rtol=1e-5)
    # E4M3 has 3 bits of mantissa: a rounding moves a value by 2^-4 of it at most, or half a subnormal step of 2^-9.
    difference = (values.double() * scale.double() - exact).abs()
    assert bool((difference <= exact.abs() * (2**-4 + 1e-5) + scale.double() * 2**-10).all())
    fake_values, fake_scale = op.fake(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments))
    assert (fake_values.shape, fake_values.dtype) == (values.shape, torch.float8_e4m3fn)
    assert (fake_scale.shape, fake_scale.dtype) == (scale.shape, torch.float32)


@OPS
def test_onnx_function_in_onnxruntime_is_the_reference(op: Op) -> None:
    arguments, _ = drawn(op, torch.float32)
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    numbers = dict(zip(op.attributes, [x for x in arguments if not isinstance(x, torch.Tensor)], strict=True))
    kinds = {torch.float32: onnx.TensorProto.FLOAT, torch.int64: onnx.TensorProto.INT64}
    inputs = [
        onnx.helper.make_tensor_value_info(name, kinds[x.dtype], x.shape)
        for name, x in zip(op.inputs, tensors, strict=True)
    ]
    # Outputs are read in float32: numpy has no 8-bit floats.
    nodes = [
        onnx.helper.make_node(op.name, op.inputs, op.results, domain=DOMAIN, **numbers),
        onnx.helper.make_node("Cast", [op.results[0]], ["wide"], to=onnx.TensorProto.FLOAT),
    ]
    outputs = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in ("wide", op.results[1])]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "one", inputs, outputs),
        functions=[op.function()],
        opset_imports=[onnx.helper.make_opsetid("", ONNX_OPSET), onnx.helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found, found_scale = session.run(None, {n: x.numpy() for n, x in zip(op.inputs, tensors, strict=True)})
    values, scale = op(*arguments)
    assert np.allclose(found_scale, scale.numpy(), rtol=1e-6)
    # Float32 sums in another order put a value in some thousands on the other side of a middle.
    assert np.mean(found != values.float().numpy()) < 0.01
