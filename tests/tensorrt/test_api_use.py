"""What our code calls of TensorRT exists: its builder half in TensorRT-RTX, its runtime half in TensorRT 11 as well.

TensorRT itself cannot be imported without its GPU libraries; its lean runtime, of the same version, can.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import tensorrt_lean_bindings as lean
import tensorrt_rtx_bindings as rtx

from tests.tensorrt.api_use import Reader, Use

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / "engines/tensorrt.py",
    *sorted((ROOT / "engines/backends/tensorrt").glob("*.py")),
    *sorted((ROOT / "engines/sessions").glob("*.py")),
]

ONLY_RTX = {
    ("IRuntimeConfig", "create_runtime_cache"): "kernels are compiled when first run, by TensorRT-RTX alone",
    ("IRuntimeConfig", "set_runtime_cache"): "the same",
    ("IRuntimeConfig", "get_runtime_cache"): "the same",
    ("IRuntimeConfig", "cuda_graph_strategy"): "TensorRT-RTX captures graphs by itself",
    ("IRuntimeConfig", "dynamic_shapes_kernel_specialization_strategy"): "kernels are compiled when first run",
    ("Runtime", "engine_header_size"): "the check of a plan before it is opened is TensorRT-RTX's",
    ("Runtime", "get_engine_validity"): "the same",
}
"""What only one package has of a class that both have; the code asks `Flavour` before it uses them."""


def uses_of(bindings: ModuleType, source: str) -> Reader:
    return Reader(bindings, "sample.py", source).read()


def found() -> list[Reader]:
    return [Reader(rtx, str(path.relative_to(ROOT)), path.read_text()).read() for path in SOURCES]


def missing(bindings: ModuleType, use: Use) -> bool:
    """Whether the bindings lack it; of a class that they do not have at all, nothing is said."""
    owner: object = bindings
    for part in filter(None, use.owner.split(".")):
        owner = getattr(owner, part, None)
    return owner is not None and not hasattr(owner, use.attribute)


def test_everything_that_is_used_exists_in_tensorrt_rtx() -> None:
    readers = found()
    assert [problem for reader in readers for problem in reader.problems] == []
    assert [use for reader in readers for use in reader.uses if missing(rtx, use)] == []


def test_of_classes_that_the_runtime_of_tensorrt_has_everything_that_is_used_exists_there() -> None:
    uses = {use for reader in found() for use in reader.uses if use.owner}
    wrong = [u for u in uses if missing(lean, u) and (u.owner, u.attribute) not in ONLY_RTX]
    assert wrong == []


def test_what_is_said_to_be_of_one_package_only_is() -> None:
    for owner, attribute in ONLY_RTX:
        assert hasattr(getattr(rtx, owner), attribute)
        assert not hasattr(getattr(lean, owner), attribute)


def test_the_reader_sees_the_calls_that_matter() -> None:
    """Were the types lost on the way, the tests above would have nothing to check."""
    seen = {(use.owner, use.attribute) for reader in found() for use in reader.uses}
    assert {
        ("", "Builder"),
        ("Builder", "build_serialized_network"),
        ("IBuilderConfig", "set_memory_pool_limit"),
        ("IBuilderConfig", "set_compute_capability"),
        ("MemoryPoolType", "WORKSPACE"),
        ("INetworkDefinition", "get_input"),
        ("ITensor", "shape"),
        ("IOptimizationProfile", "set_shape"),
        ("OnnxParser", "load_initializer"),
        ("ParserError", "node_operator"),
        ("IAttention", "decomposable"),
        ("ITimingCache", "combine"),
        ("IProgressMonitor", "step_complete"),
        ("ILogger", "log"),
        ("ILogger.Severity", "name"),
        ("Runtime", "deserialize_cuda_engine"),
        ("IExecutionContext", "set_tensor_address"),
        ("IExecutionContext", "execute_async_v3"),
        ("IRuntimeConfig", "set_execution_context_allocation_strategy"),
        ("IRuntimeCache", "serialize"),
        ("ICudaEngine", "create_engine_inspector"),
        ("EngineInspector", "get_engine_information"),
        ("LayerInformationFormat", "JSON"),
    } <= seen


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("flavour.module.Bilder", ("", "Bilder")),
        ("flavour.module.MemoryPoolType.SCRATCH", ("MemoryPoolType", "SCRATCH")),
        ("config.max_workspace_size = 1", ("IBuilderConfig", "max_workspace_size")),
        ("config.get_timing_cache().store()", ("ITimingCache", "store")),
        ("[layer.kind for layer in layers]", ("ILayer", "kind")),
    ],
)
def test_a_name_that_does_not_exist_is_found(body: str, what: tuple[str, str]) -> None:
    source = f"def f(flavour, config: trt.IBuilderConfig, layers: list[trt.ILayer]):\n    {body}\n"
    reader = uses_of(rtx, source)
    assert [(u.owner, u.attribute) for u in reader.uses if missing(rtx, u)] == [what]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("config.set_memory_pool_limit(1, bytes=2)", "IBuilderConfig.set_memory_pool_limit takes no such arguments"),
        ("config.create_timing_cache()", "IBuilderConfig.create_timing_cache takes no such arguments"),
        ("config.builder.x", "a value whose type is not stated"),
    ],
)
def test_arguments_and_lost_types_are_found(body: str, complaint: str) -> None:
    (problem,) = uses_of(rtx, f"def f(config: trt.IBuilderConfig):\n    {body}\n").problems
    assert complaint in problem
