"""Quantised graphs: exactly the listed layers, nothing else touched, equal to eager, and as far off as theory says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from denoiser_checkpoint import CONFIG, DenoiserCheckpoint, denoiser_graphs
from onnx.reference import ReferenceEvaluator
from torch import nn

from engines.backends.tensorrt.expectation import expected
from engines.backends.tensorrt.process import build_plan
from engines.backends.tensorrt.request import Constant, PlanRequest
from engines.store import AxisRange
from export.bake import bake
from export.binding import bind
from export.checkpoint import Stored, materialise
from export.compare import CompareError, compare, draw
from export.emit import Emitted, emit
from export.graphs.graph import Graph
from export.linears import LINEARS, LinearsError, quantised_linears
from export.passes.native_fp4 import native_fp4
from export.passes.quantise_linears import quantise_linears
from export.schemes import SCHEMES, SchemeName
from export.sidecar import Sidecar, plan_sidecar
from export.trace import BoundModule

BF16 = torch.bfloat16
KEPT = ("prologue", "epilogue", "modulation.time", "modulation.adaln", "block.attend")
Emit = Callable[[str, str, SchemeName], Emitted]


@pytest.fixture(scope="session")
def sidecars(
    denoisers: dict[str, DenoiserCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, SchemeName], Sidecar]:
    """The written file of each layout and scheme: one for all graphs."""
    directory, made = tmp_path_factory.mktemp("sidecars"), {}
    for layout, checkpoint in denoisers.items():
        for scheme in SCHEMES:
            graphs = denoiser_graphs(checkpoint, BF16).values()
            made[layout, scheme] = plan_sidecar(graphs, scheme, directory / layout, "denoiser")
            made[layout, scheme].write()
    return made


@pytest.fixture(scope="session")
def emit_quantised(denoisers: dict[str, DenoiserCheckpoint], sidecars: dict[tuple[str, SchemeName], Sidecar]) -> Emit:
    known: dict[tuple[str, str, SchemeName], Emitted] = {}

    def emitted(layout: str, name: str, scheme: SchemeName) -> Emitted:
        key = layout, name, scheme
        if key not in known:
            graph = denoiser_graphs(denoisers[layout], BF16)[name]
            known[key] = emit(quantise_linears(graph, sidecars[layout, scheme]))
        return known[key]

    return emitted


@pytest.mark.parametrize(("layout", "count"), [("native", 4), ("native-stacked", 4), ("diffusers", 6)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_exactly_the_linears_of_blocks_and_refiner_are_quantised(
    denoisers: dict[str, DenoiserCheckpoint],
    sidecars: dict[tuple[str, SchemeName], Sidecar],
    layout: str,
    count: int,
    scheme: SchemeName,
) -> None:
    sidecar = sidecars[layout, scheme]
    assert len(sidecar.weights) == count * (CONFIG["num_layers"] + CONFIG["num_refiner_layers"])
    counts = {"context": count * CONFIG["num_refiner_layers"], "block": count}
    counts |= {"block.project": count - 3, "block.finish": 3}
    for name, graph in denoiser_graphs(denoisers[layout], BF16).items():
        quantised = quantise_linears(graph, sidecar)
        if name in KEPT:
            assert quantised is graph
            continue
        layers = [m for m in quantised.module().modules() if isinstance(m, SCHEMES[scheme].linear)]
        plain = [n for n, m in quantised.module().named_modules() if isinstance(m, nn.Linear)]
        assert len(layers) == counts[name]
        assert plain == (["context_embedder"] if name == "context" else [])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_other_weight_is_the_same_object_and_every_instance_has_its_own(
    denoisers: dict[str, DenoiserCheckpoint], sidecars: dict[tuple[str, SchemeName], Sidecar], scheme: SchemeName
) -> None:
    for graph in denoiser_graphs(denoisers["native"], BF16).values():
        quantised = quantise_linears(graph, sidecars["native", scheme])
        gone = {f"{name}.weight" for name in quantised_linears(graph)}
        for before, after in zip(graph.weights, quantised.weights, strict=True):
            assert all(after[name] is before[name] for name in before.keys() - gone)
            added = {name: after[name] for name in after.keys() - (before.keys() - gone)}
            assert len(added) == len(gone) * len(SCHEMES[scheme].suffixes)
            assert all(isinstance(w, Stored) and w.file == sidecars["native", scheme].path for w in added.values())
    whole = quantise_linears(denoiser_graphs(denoisers["native"], BF16)["block"], sidecars["native", scheme])
    offsets = [w.offset for i in whole.weights for w in i.values() if w.file == sidecars["native", scheme].path]
    assert len(set(offsets)) == len(offsets)


def test_names_of_weight_inputs_are_the_files_keys_without_the_layer(emit_quantised: Emit) -> None:
    emitted = emit_quantised("native", "block", "fp8")
    assert emitted.weight_names[-8:] == tuple(
        f"{name}.weight.{suffix}"
        for name in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
        for suffix in ("fp8", "scale")
    )
    assert emitted.bindings[2]["mlp.fc1.weight.fp8"].key == "blocks.2.mlp.fc1.weight.fp8"
    types = {i.name: i.type.tensor_type.elem_type for i in emitted.model.graph.input}
    assert types["mlp.fc1.weight.fp8"] == onnx.TensorProto.FLOAT8E4M3FN
    assert types["mlp.fc1.weight.scale"] == onnx.TensorProto.FLOAT


MATRIX: list[tuple[str, str, SchemeName]] = [
    ("native", "block", "fp8"),
    ("diffusers", "context", "fp8"),
    ("native", "block", "nvfp4"),
]


@pytest.mark.parametrize(("layout", "name", "scheme"), MATRIX)
def test_onnxruntime_agrees_with_eager_on_first_and_last_instance(
    emit_quantised: Emit, layout: str, name: str, scheme: SchemeName
) -> None:
    emitted = emit_quantised(layout, name, scheme)
    linears = (6 if layout == "diffusers" else 4) * (CONFIG["num_refiner_layers"] if name == "context" else 1)
    assert emitted.census[f"h3::{scheme}_linear"] == linears
    for instance in {0, len(emitted.bindings) - 1}:
        differences = [d.relative for d in compare(emitted, instance).differences]
        # Where no rounding falls to the other side, as in most trials, both agree as graphs do that are not quantised.
        assert min(differences) < 1e-5


def test_the_wider_tolerance_still_sees_another_order_of_a_packed_projection(emit_quantised: Emit) -> None:
    emitted = emit_quantised("native", "block", "fp8")
    wrong = _module(emitted.graph, lambda module: setattr(module.finish.feed_forward, "gate_first", False))
    with pytest.raises(CompareError, match="relative difference"):
        compare(replace(emitted, graph=wrong))


def test_a_baked_instance_reads_the_sidecars_bytes(emit_quantised: Emit) -> None:
    emitted = emit_quantised("native", "block", "fp8")
    external = {i.name: {e.key: e.value for e in i.external_data} for i in bake(emitted, 1).graph.initializer}
    stored = emitted.bindings[1]["mlp.fc2.weight.fp8"]
    entry = external["mlp.fc2.weight.fp8"]
    assert (entry["location"], int(entry["offset"])) == (stored.file.name, stored.offset)


@pytest.mark.parametrize(("scheme", "dtype"), [("fp8", "FP8"), ("nvfp4", "FP4")])
def test_tensorrt_takes_the_sidecars_bytes_as_baked_weights(
    emit_quantised: Emit, tmp_path: Path, scheme: SchemeName, dtype: str
) -> None:
    emitted = emit_quantised("native", "block", scheme)
    file = tmp_path / "block.onnx"
    file.write_bytes(native_fp4(bake(emitted, 1)).SerializeToString())
    bound = emitted.bindings[1]
    request = PlanRequest(
        graph="block",
        flavour="tensorrt_rtx",
        model=file,
        capabilities=("12.0",),
        profiles=({"rows": AxisRange(minimum=1, optimum=64, maximum=128)},),
        constants={n: Constant(file=s.file, offset=s.offset, nbytes=s.nbytes) for n, s in bound.items()},
        workspace_bytes=1 << 30,
        timing_cache=None,
        expected=expected(native_fp4(emitted.model)),
    )
    result = build_plan(request, tmp_path / "plan", lambda phase, done, of: None)
    assert result.census[f"gemm.{dtype}"] == 4
    # They are in the plan, and as narrow as in the file: in 16 bits they would be twice or four times as large.
    total = sum(stored.nbytes for stored in bound.values())
    assert total <= result.weights_bytes < 1.5 * total


class NoisyLinear(nn.Linear):
    """A linear layer whose factors have errors of the size that theory gives for a scheme's roundings."""

    scheme: SchemeName

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self._err(x), self._err(self.weight))

    def _err(self, x: torch.Tensor) -> torch.Tensor:
        """The shares are derived in tests/plugins/test_quantised_linears.py, of a value and of its block's size."""
        if self.scheme == "fp8":
            return x + x * 0.0266 * torch.randn_like(x)
        blocks = x.unflatten(-1, (-1, 16))
        size = blocks.square().mean(-1, keepdim=True).sqrt()
        return (blocks + size * 0.1 * torch.randn_like(blocks)).flatten(-2)


def noisy(graph: Graph, scheme: SchemeName) -> Graph:
    def change(module: nn.Module) -> None:
        for name in quantised_linears(graph):
            linear = module.get_submodule(name)
            module.set_submodule(name, NoisyLinear(linear.in_features, linear.out_features, bias=False))
            module.get_submodule(name).scheme = scheme

    return _module(graph, change)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_block_errs_as_its_roundings_do(
    denoisers: dict[str, DenoiserCheckpoint], sidecars: dict[tuple[str, SchemeName], Sidecar], scheme: SchemeName
) -> None:
    """As much as random errors of the same size do: no layer loses more than its roundings, and none is left out.

    In float32, so that no other rounding counts. What the block adds to its input is looked at.
    """
    graph = denoiser_graphs(denoisers["native"], torch.float32)["block"]
    inputs = tuple(draw(s, {"rows": 200}, torch.Generator().manual_seed(3)) for s in graph.inputs)
    exact = run_eager(graph, inputs)
    scale = (exact - inputs[0]).norm()
    error = (run_eager(quantise_linears(graph, sidecars["native", scheme]), inputs) - exact).norm() / scale
    torch.manual_seed(4)
    expected = (run_eager(noisy(graph, scheme), inputs) - exact).norm() / scale
    # Inner sizes are 80 to 384, at which errors of single rows and channels do not average out as in the limit.
    assert error.item() == pytest.approx(expected.item(), rel=0.15)


def run_eager(graph: Graph, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    binding = bind(graph)
    weights = tuple(materialise(binding.instances[0][w.name]) for w in binding.inputs)
    with torch.no_grad():
        result = BoundModule(graph, binding)(inputs, weights)
    assert isinstance(result, torch.Tensor)
    return result.float()


def test_native_fp4_gives_the_same_result_over_the_same_bytes(emit_quantised: Emit) -> None:
    """Run by onnx's own evaluator, the only one that knows the type on a CPU, on one of the block's layers."""
    emitted = emit_quantised("native", "block", "nvfp4")
    native = native_fp4(emitted.model)
    onnx.checker.check_model(native, full_check=True)
    types = {i.name: i.type.tensor_type for i in native.graph.input}
    packed = types["mlp.fc2.weight.nvfp4"]
    assert packed.elem_type == onnx.TensorProto.FLOAT4E2M1
    assert [d.dim_value for d in packed.shape.dim] == [CONFIG["hidden_size"], CONFIG["ffn_dim"]]
    stored = {n: materialise(emitted.bindings[0][f"mlp.fc2.weight.{n}"]) for n in ("nvfp4", "block_scale", "scale")}
    x = torch.randn(5, CONFIG["ffn_dim"])
    feed = {
        "x": x.numpy(),
        "weight_packed": _as_onnx_fp4(stored["nvfp4"]),
        "weight_block_scale": stored["block_scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn),
        "weight_scale": stored["scale"].numpy(),
    }
    found = ReferenceEvaluator(_one_call(native)).run(None, feed)[0]
    expected = SCHEMES["nvfp4"].linear(CONFIG["ffn_dim"], CONFIG["hidden_size"])
    for name, tensor in zip(("weight_packed", "weight_block_scale", "weight_scale"), stored.values(), strict=True):
        setattr(expected, name, nn.Parameter(tensor, requires_grad=False))
    # The same quantised values; 112 products of them are summed in float32.
    np.testing.assert_allclose(found, expected(x).numpy(), rtol=0, atol=112 * 6e-8 * np.abs(found).max())


def _as_onnx_fp4(packed: torch.Tensor) -> np.ndarray:
    dims = [packed.shape[0], 2 * packed.shape[1]]
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT4E2M1, dims=dims, raw_data=packed.numpy().tobytes())
    return onnx.numpy_helper.to_array(tensor)


def _one_call(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model that calls the model's NVFP4 function once, on float32 rows."""
    (function,) = [f for f in model.functions if f.name == "nvfp4_linear"]
    types = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT4E2M1, onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT)
    inputs = [onnx.helper.make_tensor_value_info(n, t, None) for n, t in zip(function.input, types, strict=True)]
    node = onnx.helper.make_node(function.name, function.input, ["result"], domain=function.domain)
    output = onnx.helper.make_tensor_value_info("result", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([node], "one", inputs, [output])
    return onnx.helper.make_model(graph, functions=[function], opset_imports=model.opset_import, ir_version=11)


def _module(graph: Graph, change: Callable[[nn.Module], None]) -> Graph:
    def build() -> nn.Module:
        module = graph.module()
        change(module)
        return module

    return replace(graph, module=build)


def test_a_linear_that_no_list_names_is_refused(denoisers: dict[str, DenoiserCheckpoint]) -> None:
    graph = denoiser_graphs(denoisers["native"], BF16)["block"]
    odd = _module(graph, lambda module: module.register_module("extra", nn.Linear(4, 4)))
    with pytest.raises(LinearsError, match=r"graph block: linear layer \['extra'\] must be quantised or kept"):
        quantised_linears(odd)


def test_a_listed_linear_that_is_not_there_is_refused(denoisers: dict[str, DenoiserCheckpoint]) -> None:
    graph = denoiser_graphs(denoisers["native"], BF16)["context"]
    odd = _module(graph, lambda module: module.set_submodule("blocks.1.feed_forward.down", nn.Identity()))
    with pytest.raises(LinearsError, match=r"has no linear layer \['blocks.1.feed_forward.down'\]"):
        quantised_linears(odd)


def test_two_packings_of_the_projections_at_once_are_refused(denoisers: dict[str, DenoiserCheckpoint]) -> None:
    graph = denoiser_graphs(denoisers["native"], BF16)["block"]
    odd = _module(graph, lambda module: module.project.attention.project.update({"query": nn.Linear(4, 4)}))
    with pytest.raises(LinearsError, match="must have the linear layers of one of"):
        quantised_linears(odd)


def test_a_graph_that_is_not_listed_is_refused(denoisers: dict[str, DenoiserCheckpoint]) -> None:
    graph = replace(denoiser_graphs(denoisers["native"], BF16)["block"], name="new")
    with pytest.raises(LinearsError, match=r"graph new: is not listed in export\.linears; listed are .*block"):
        quantised_linears(graph)


def test_a_quantised_linear_with_a_bias_is_refused(
    denoisers: dict[str, DenoiserCheckpoint], sidecars: dict[tuple[str, SchemeName], Sidecar]
) -> None:
    graph = denoiser_graphs(denoisers["native"], BF16)["block"]
    odd = _module(graph, lambda module: module.set_submodule("finish.attention.out", nn.Linear(384, 80)))
    with pytest.raises(LinearsError, match=r"linear layer finish\.attention\.out has a bias"):
        quantise_linears(odd, sidecars["native", "fp8"]).module()


def test_every_listed_graph_exists(denoisers: dict[str, DenoiserCheckpoint]) -> None:
    assert set(LINEARS["denoiser"]) == set(denoiser_graphs(denoisers["native"], BF16))
