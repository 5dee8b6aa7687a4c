"""What an entry of the registry gives for free: schema, dispatch by device, and a place in every exported graph."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch

from plugins.op import Fast, Op
from plugins.ops import all_reduce, attention, fp8_linear, swiglu
from plugins.registry import REGISTRY
from plugins.translation import translation_table


def _affine(x: torch.Tensor, bias: torch.Tensor, factor: float, times: int) -> torch.Tensor:
    return x * factor * times + bias


def _affine_fake(x: torch.Tensor, bias: torch.Tensor, factor: float, times: int) -> torch.Tensor:
    return torch.empty_like(x)


BODY = """
    f = Constant <value_float: float = @factor> ()
    n = Constant <value_int: int = @times> ()
    wide = Cast <to = 1> (n)
    product = Mul (f, wide)
    scaled = Mul (x, product)
    result = Add (scaled, bias)
"""


@pytest.fixture(scope="module")
def affine() -> Op:
    return Op("affine_for_tests", _affine, _affine_fake, BODY)


def test_schema_is_read_from_the_reference(affine: Op) -> None:
    assert affine.schema == "(Tensor x, Tensor bias, float factor, SymInt times) -> Tensor"
    assert affine.inputs == ("x", "bias")
    assert affine.attributes == ("factor", "times")


def test_an_entry_alone_is_enough_to_export_and_run_an_operation(affine: Op) -> None:
    from export.emit import attach_functions

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return affine(x.relu(), x.mean(0), 0.25, 3)

    x = torch.randn(5, 4)
    exported = torch.onnx.export(
        Model().eval(),
        (x,),
        dynamo=True,
        opset_version=23,
        verbose=False,
        custom_translation_table=translation_table([*REGISTRY, affine]),
    )
    assert exported is not None
    model = exported.model_proto
    assert [n.op_type for n in model.graph.node if n.domain == "h3"] == ["affine_for_tests"]
    attach_functions(model, [affine])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    np.testing.assert_allclose(found, Model()(x).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        ("cpu", (0, 0), attention.reference),
        ("cuda", (8, 9), attention.reference),
        ("cuda", (9, 0), attention.hopper),
        ("cuda", (10, 3), attention.cudnn),
    ],
)
def test_implementation_is_chosen_by_device_and_capability(
    device: str, capability: tuple[int, int], expected: object
) -> None:
    assert attention.OP.implementation(device, capability) is expected


def test_a_compiler_looks_into_what_is_plain_and_calls_what_is_not() -> None:
    """Attention is called as it is; the quick product of 8-bit rows is fused; so is what a compiler fuses better."""
    assert attention.OP.plain_implementation("cuda", (9, 0)) is None
    assert fp8_linear.OP.plain_implementation("cuda", (9, 0)) is fp8_linear.scaled_mm
    assert fp8_linear.OP.plain_implementation("cpu") is fp8_linear.reference
    assert swiglu.OP.implementation("cuda", (9, 0)) is swiglu.kernel
    assert swiglu.OP.plain_implementation("cuda", (9, 0)) is swiglu.reference
    assert all_reduce.OP.plain_implementation("cpu") is None


def test_first_fitting_implementation_runs() -> None:
    def faster(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    def reference(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    op = Op("fast_for_tests", reference, torch.empty_like, "result = Identity (x)", fast=(Fast("cpu", faster),))
    assert op(torch.zeros(1)).item() == 2


def test_importing_the_registry_needs_no_onnx_and_registers_nothing() -> None:
    code = (
        "import sys, torch, plugins.registry;"
        "assert not [m for m in sys.modules if m.partition('.')[0] in ('onnx', 'onnxscript', 'onnx_ir')];"
        "assert not hasattr(torch.ops.h3, 'modulated_rms_norm')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
