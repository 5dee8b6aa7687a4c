"""Profiles of quantised linears: their graphs, their files of weights, and TensorRT-RTX's plans of them."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch

from engines.backends.tensorrt.expectation import expected
from engines.backends.tensorrt.process import build_plan
from engines.backends.tensorrt.request import PlanError, PlanRequest, PlanResult
from engines.graphs import declared_graphs, profile_graphs, profile_sidecars
from engines.profile import Profile
from engines.quantise_step import QuantiseStep
from engines.sessions.onnxruntime import mapped_value
from engines.sessions.weights import MappedWeights
from engines.steps import Ledger
from engines.store import WEIGHTS, AxisRange, Region, weight_file
from engines.weight_table import WeightTable, Written
from export.binding import bind
from export.checkpoint import Checkpoint
from export.checkpoint.safetensors_file import write_tensors
from export.emit import Emitted, emit
from export.graphs.graph import Graph
from export.graphs.model import check_consumption
from export.miniature import write_sparse_released
from export.passes.native_fp4 import native_fp4
from export.schemes import Fp8Linear

ROWS = AxisRange(minimum=1, optimum=55_296, maximum=110_592)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The release's sizes, in sparse files."""
    root = tmp_path_factory.mktemp("released") / "checkpoint"
    write_sparse_released(root, "native")
    return Checkpoint.open(root)


def profile(**precision: str) -> Profile:
    """The RTX 5090's with whole blocks, in another precision."""
    shipped = Profile.load("rtx5090")
    changed = shipped.precision.model_copy(update=precision)
    return shipped.model_copy(update={"row_chunk": 0, "precision": changed})


def by_name(graphs: tuple[Graph, ...]) -> dict[str, Graph]:
    return {graph.name: graph for graph in graphs}


def files(graph: Graph) -> set[str]:
    """The directories that the graph's weights lie in."""
    return {leaf.file.parent.name for weights in graph.weights for w in weights.values() for leaf in w.leaves()}


def test_only_components_of_that_precision_read_quantised_weights(released: Checkpoint, tmp_path: Path) -> None:
    store = tmp_path / WEIGHTS
    denoiser = by_name(profile_graphs(released, profile(denoiser="fp8"), "fl2va", store))
    assert {name for name, graph in denoiser.items() if WEIGHTS in files(graph)} == {"context", "block"}
    both = by_name(profile_graphs(released, profile(denoiser="nvfp4", text_encoder="fp8"), "fl2va", store))
    assert {name for name, g in both.items() if WEIGHTS in files(g)} == {"context", "block", "text_encoder.layer"}
    plain = profile(denoiser="bfloat16")
    assert profile_sidecars(released, plain, "fl2va", store) == ()
    assert all(WEIGHTS not in files(graph) for graph in profile_graphs(released, plain, "fl2va", store))


def test_a_block_and_its_segments_read_the_same_file(released: Checkpoint, tmp_path: Path) -> None:
    whole, segmented = profile(), profile().model_copy(update={"row_chunk": 16_384})
    (one,), (other,) = (profile_sidecars(released, p, "fl2va", tmp_path) for p in (whole, segmented))
    assert (one.path, one.weights) == (other.path, other.weights)
    graphs = by_name(profile_graphs(released, segmented, "fl2va", tmp_path / WEIGHTS))
    assert {name for name, graph in graphs.items() if WEIGHTS in files(graph)} == {
        "context",
        "block.project",
        "block.finish",
    }
    layers = [[m for m in graphs[f"block.{n}"].module().modules() if isinstance(m, Fp8Linear)] for n in SEGMENTS]
    assert [len(each) for each in layers] == [1, 0, 3]


SEGMENTS = ("project", "attend", "finish")


@pytest.mark.parametrize("row_chunk", [0, 16_384])
def test_graphs_of_further_tiers_are_variants_over_the_weights_of_the_first(
    released: Checkpoint, tmp_path: Path, row_chunk: int
) -> None:
    tiers = Profile.load("h200_inductor_fp8").model_copy(update={"row_chunk": row_chunk})
    graphs = by_name(profile_graphs(released, tiers, "fl2va", tmp_path))
    alone = by_name(profile_graphs(released, tiers.model_copy(update={"quality": {}}), "fl2va", tmp_path))
    attends = "block.attend" if row_chunk else "block"
    assert graphs.keys() - alone.keys() == {f"{attends}.skip", f"{attends}.sage+skip"}
    for kind in ("skip", "sage+skip"):
        graph = graphs[f"{attends}.{kind}"]
        assert graph.variant == kind
        assert bind(graph) == bind(graphs[attends])
        assert graph.outputs[:1] == graphs[attends].outputs
    sidecars = [profile_sidecars(released, p, "fl2va", tmp_path) for p in (tiers, profile(denoiser="fp8"))]
    assert [one.path for one in sidecars[0]][-1:] == [one.path for one in sidecars[1]][-1:]
    check_consumption(released, declared_graphs(released, tiers, "fl2va"), "fl2va")


def test_one_file_a_component_holds_half_of_what_it_replaces(released: Checkpoint, tmp_path: Path) -> None:
    chosen = profile(denoiser="fp8", text_encoder="fp8")
    text, denoiser = profile_sidecars(released, chosen, "fl2va", tmp_path)
    assert text.path.name.startswith("text_encoder.fl2va.fp8.")
    assert denoiser.path.name.startswith("denoiser.fl2va.fp8.")
    # spec/model.md 2.2: 52 blocks (two of the refiner) of four projections, a byte a weight and four a channel.
    channels, weights = 3 * 7168 + 5376 + 28672 + 5376, 4 * 7168 * 5376 + 3 * 14336 * 5376
    assert denoiser.size - len(denoiser.header) == 52 * (weights + 4 * channels)
    assert len(text.weights) == 50 * 7


def test_plans_of_another_partition_lie_elsewhere(released: Checkpoint, tmp_path: Path) -> None:
    paths = {profile_sidecars(released, profile(), p, tmp_path)[0].path for p in ("fl2va", "ref2va")}
    assert len(paths) == 2


def test_declared_graphs_still_consume_the_checkpoint_exactly(released: Checkpoint) -> None:
    check_consumption(
        released, declared_graphs(released, profile(denoiser="fp8", text_encoder="fp8"), "fl2va"), "fl2va"
    )


def test_a_build_knows_the_file_before_it_is_there(released: Checkpoint, tmp_path: Path) -> None:
    (sidecar,) = profile_sidecars(released, profile(), "fl2va", tmp_path)
    block = by_name(profile_graphs(released, profile(), "fl2va", tmp_path))["block"]
    record = {"path": f"{WEIGHTS}/{sidecar.path.name}", "size": sidecar.size, "header_sha256": sidecar.header_sha256}
    written = Written("denoiser.quantise", weight_file(_any_file(released)).model_copy(update=record))
    table = WeightTable([bind(block)], {sidecar.path: written})
    assert table.made_by(bind(block).instances) == ("denoiser.quantise",)
    fc1 = bind(block).instances[49]["mlp.fc1.weight.fp8"]
    region = table.regions({"w": fc1})["w"]
    assert table.files[region.file] == written.file
    assert region.offset + region.nbytes("float8_e4m3fn") <= sidecar.size


def test_what_was_made_of_weights_without_data_is_not_taken_for_that_of_real_ones(
    released: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build may be begun with files made for their dimensions alone, and resumed with those of the same headers."""
    (sidecar,) = profile_sidecars(released, profile(), "fl2va", tmp_path)
    binding = bind(by_name(declared_graphs(released, profile(), "fl2va"))["block"])
    step, table = QuantiseStep(sidecar, tmp_path, Ledger(tmp_path, str, print).work), WeightTable([binding], {})
    empty = step.step().depends_on, table.contents(binding.instances)
    monkeypatch.setattr("engines.quantise_step.lacks_data", lambda file: False)
    monkeypatch.setattr("engines.weight_table.lacks_data", lambda file: False)
    real = step.step().depends_on, table.contents(binding.instances)
    assert empty[0] != real[0]
    assert empty[1] != real[1]


def _any_file(checkpoint: Checkpoint) -> Path:
    return next(iter(checkpoint.stored("denoiser").values())).file


@pytest.mark.parametrize(
    ("dtype", "name", "onnx_type"),
    [
        (torch.float8_e4m3fn, "float8_e4m3fn", onnx.TensorProto.FLOAT8E4M3FN),
        (torch.uint8, "uint8", onnx.TensorProto.UINT8),
    ],
)
def test_quantised_weights_are_mapped_for_onnxruntime(
    tmp_path: Path, dtype: torch.dtype, name: str, onnx_type: int
) -> None:
    tensor = torch.arange(6, dtype=torch.uint8).view(2, 3).view(dtype)
    write_tensors(tmp_path / "w.safetensors", {"w": tensor}, {})
    start = (tmp_path / "w.safetensors").stat().st_size - 6
    mapped = MappedWeights([weight_file(tmp_path / "w.safetensors")])
    value = mapped_value(mapped, Region(0, start, (2, 3)), name)  # type: ignore[arg-type]
    assert isinstance(value, ort.OrtValue)
    assert (value.element_type(), value.shape()) == (onnx_type, [2, 3])
    assert mapped.array(Region(0, start, (2, 3)), name).tolist() == [[0, 1, 2], [3, 4, 5]]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def blocks(released: Checkpoint) -> dict[str, Emitted]:
    """The released block in each scheme."""
    graphs = {s: profile_graphs(released, profile(denoiser=s), "fl2va", released.root) for s in ("fp8", "nvfp4")}
    return {scheme: emit(by_name(found)["block"]) for scheme, found in graphs.items()}


def build(model: onnx.ModelProto, capability: str, directory: Path) -> PlanResult:
    file = directory / "block.onnx"
    file.write_bytes(model.SerializeToString())
    request = PlanRequest(
        graph="block",
        flavour="tensorrt_rtx",
        model=file,
        capabilities=(capability,),
        profiles=({"rows": ROWS},),
        constants={},
        workspace_bytes=32 << 30,
        timing_cache=None,
        expected=expected(model),
    )
    return build_plan(request, directory / "plan", lambda phase, done, of: None)


@pytest.mark.parametrize("capability", ["8.9", "12.0"])
def test_the_released_block_is_four_fp8_products(blocks: dict[str, Emitted], capability: str, tmp_path: Path) -> None:
    model = blocks["fp8"].model
    assert sorted(expected(model).matmul_nodes.values()) == ["FP8"] * 4
    result = build(model, capability, tmp_path)
    products = [layer for layer in result.layers if layer.kind == "gemm"]
    assert [[t.dtype for t in layer.inputs] for layer in products] == [["FP8", "FP8"]] * 4
    assert result.census["attention.fused"] == 1


def test_the_released_block_is_four_fp4_products_on_blackwell(blocks: dict[str, Emitted], tmp_path: Path) -> None:
    model = native_fp4(blocks["nvfp4"].model)
    assert sorted(expected(model).matmul_nodes.values()) == ["FP4"] * 4
    result = build(model, "12.0", tmp_path)
    products = [layer for layer in result.layers if layer.kind == "gemm"]
    assert [[t.dtype for t in layer.inputs] for layer in products] == [["FP4", "FP4", "FP8", "FP8"]] * 4


def test_ada_has_no_fp4_products(blocks: dict[str, Emitted], tmp_path: Path) -> None:
    """docs.nvidia.com/deeplearning/tensorrt-rtx, support matrix, table 1: FP4 GEMM on 12.0 (Blackwell) but not 8.9."""
    with pytest.raises(PlanError, match=r"Cannot compile for target\(s\) sm89, .* HW-specific datatypes: fp4_e2m1"):
        build(native_fp4(blocks["nvfp4"].model), "8.9", tmp_path)


def test_nvfp4_without_the_4_bit_type_is_refused_as_no_quantised_product(blocks: dict[str, Emitted]) -> None:
    """The form that ONNX Runtime can run (it has no kernels for the type on CPUs) would be float32 in TensorRT."""
    with pytest.raises(ValueError, match=r"4 matrix products of quantised operands expected, .* 0 found"):
        expected(blocks["nvfp4"].model)
