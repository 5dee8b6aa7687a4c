"""Engines at released dimensions without a checkpoint's data: compiled here, their weights drawn on the device."""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engines import machine
from engines.backends.inductor import compile_graph, ranges
from engines.declaration import axes, tensor_record
from engines.graphs import profile_graphs
from engines.profile import Partition, Profile
from engines.quality import weights_of
from engines.sessions.backend import Opening
from engines.sessions.dtypes import TORCH
from engines.sessions.engine_set import EngineSet
from engines.sessions.gpu import CudaGpu
from engines.sessions.inductor import InductorEngines
from engines.store import (
    SCHEMA_VERSION,
    AxisRecord,
    CheckpointRecord,
    EngineRecord,
    EngineStore,
    FileRecord,
    Manifest,
    ProgramRecord,
    Region,
    TensorRecord,
    file_sha256,
)
from export.binding import Binding, bind
from export.checkpoint import Checkpoint
from export.graphs.graph import Graph
from export.miniature import write_sparse_released
from plugins.op import ONNX_OPSET

PARTITION: Partition = "fl2va"

DEVICE = torch.device("cuda", 0)

WEIGHT_DEVIATION = 0.02
"""Standard deviation of matrices' elements."""

E4M3_DEVIATION = 100.0
"""Standard deviation of 8-bit elements, whose largest is 448; their scales make up for it."""


def synthetic_store(profile: Profile, folder: Path, names: Sequence[str] = (), processes: int = 12) -> EngineStore:
    """A store of those graphs (all by default) at released dimensions, compiled side by side where they are not yet."""
    checkpoint = _checkpoint(folder)
    graphs = [g for g in _graphs(profile, checkpoint, folder) if not names or g.name in names]
    missing = [graph.name for graph in graphs if not _package(folder, profile, graph.name).exists()]
    if missing:
        # Processes of their own: the compiler keeps state, and each wants a processor.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(processes, len(missing)), mp_context=context) as pool:
            list(pool.map(_compile, missing, [profile] * len(missing), [folder] * len(missing)))
    return EngineStore(folder, _manifest(profile, checkpoint, folder, graphs))


def open_engines(store: EngineStore, weights: RandomWeights | None = None) -> EngineSet:
    """The store's engines on the GPU with random weights."""
    graphs = tuple(store.manifest.graphs)
    drawn = weights or RandomWeights(store.manifest)
    backend = InductorEngines(Opening(store, graphs, (PARTITION,)), drawn, CudaGpu(DEVICE))
    return EngineSet(store, graphs, (PARTITION,), backend)


@dataclass
class RandomWeights:
    """Weights of a manifest's graphs, drawn on the device when they are first bound, and kept."""

    manifest: Manifest
    seed: int = 0
    _drawn: dict[tuple[str, int], dict[str, torch.Tensor]] = field(default_factory=dict)

    @contextmanager
    def tensors(self, graph: str, instance: int, partition: Partition) -> Iterator[dict[str, torch.Tensor]]:
        """Every weight of an instance."""
        owner = weights_of(graph)
        if (owner, instance) not in self._drawn:
            self._drawn[owner, instance] = self._draw(owner, instance)
        yield self._drawn[owner, instance]

    def load_lasting(self) -> None:
        """Draws the weights of every instance of every graph."""
        for graph, record in self.manifest.graphs.items():
            for instance in range(record.instances):
                with self.tensors(graph, instance, PARTITION):
                    pass

    def leave(self, graphs: Collection[str]) -> None:
        """All weights stay."""

    def _draw(self, graph: str, instance: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(self.seed + 1000 * instance)
        regions = self.manifest.bindings[PARTITION][graph][instance]
        weights = self.manifest.graphs[graph].weights
        return {spec.name: draw_weight(spec, regions[spec.name].shape, generator) for spec in weights}


def draw_weight(spec: TensorRecord, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A weight on the device: matrices about 0, norms about 1, and the scales of 8-bit matrices."""
    dtype = TORCH[spec.dtype]
    if dtype == torch.float8_e4m3fn:
        return _drawn(shape, torch.float16, E4M3_DEVIATION, generator).clamp_(-448, 448).to(dtype)
    if spec.name.endswith("_scale"):
        return torch.full(shape, WEIGHT_DEVIATION / E4M3_DEVIATION, dtype=dtype, device=DEVICE)
    values = _drawn(shape, dtype, WEIGHT_DEVIATION, generator)
    return values.add_(1) if len(shape) == 1 and spec.name.endswith("weight") else values


def draw_input(
    spec: TensorRecord, sizes: Mapping[str, int], generator: torch.Generator, below: int = 1
) -> torch.Tensor:
    """An input on the device: standard normal, or integers below a bound."""
    shape = tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape)
    if TORCH[spec.dtype].is_floating_point:
        return _drawn(shape, TORCH[spec.dtype], 1.0, generator)
    return torch.randint(below, shape, dtype=TORCH[spec.dtype], device=DEVICE, generator=generator)


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, deviation: float, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(0, deviation, generator=generator)


def _checkpoint(folder: Path) -> Checkpoint:
    path = folder / "checkpoint"
    if not path.exists():
        write_sparse_released(path, "native")
    return Checkpoint.open(path)


def _graphs(profile: Profile, checkpoint: Checkpoint, folder: Path) -> tuple[Graph, ...]:
    return profile_graphs(checkpoint, profile, PARTITION, folder / "weights")


def _package(folder: Path, profile: Profile, graph: str) -> Path:
    """Where a package lies; one with another precision or attention is another."""
    described = "-".join([*(str(v) for _, v in profile.precision), profile.attention.blocks, str(profile.row_chunk)])
    return folder / f"{graph}.{described}.pt2"


def _compile(name: str, profile: Profile, folder: Path) -> None:
    (graph,) = [g for g in _graphs(profile, _checkpoint(folder), folder) if g.name == name]
    binding = bind(graph)
    target = _package(folder, profile, name)
    work = target.parent / f"work.{target.name}"
    work.mkdir(parents=True, exist_ok=True)
    compile_graph(graph, binding, ranges(graph, binding, _shapes(profile)), DEVICE, work / "program.pt2")
    (work / "program.pt2").replace(target)


def _shapes(profile: Profile) -> dict[str, tuple[int, ...]]:
    return {**profile.shapes, **({"chunk_rows": (profile.row_chunk,)} if profile.row_chunk else {})}


def _manifest(profile: Profile, checkpoint: Checkpoint, folder: Path, graphs: Sequence[Graph]) -> Manifest:
    bindings = {graph.name: bind(graph) for graph in graphs}
    return Manifest(
        schema_version=SCHEMA_VERSION,
        profile=profile,
        versions={"inductor": str(torch.__version__)},
        checkpoint=CheckpointRecord(root=str(checkpoint.root), layout=checkpoint.layout, fingerprint="synthetic"),
        dimensions=checkpoint.dimensions,
        tokenizer=_file(folder, checkpoint.tokenizer_file),
        graphs={g.name: _record(profile, folder, g, bindings[g.name]) for g in graphs},
        weight_files=(),
        bindings={PARTITION: {name: _regions(binding) for name, binding in bindings.items()}},
    )


def _record(profile: Profile, folder: Path, graph: Graph, binding: Binding) -> EngineRecord:
    named = axes(graph, binding)
    return EngineRecord(
        key="synthetic",
        file=_file(folder, _package(folder, profile, graph.name)),
        baked={},
        instances=len(graph.weights),
        inputs=tuple(tensor_record(spec) for spec in graph.inputs),
        outputs=tuple(tensor_record(spec) for spec in graph.outputs),
        weights=tuple(tensor_record(spec) for spec in binding.inputs),
        axes={n: AxisRecord(minimum=a.minimum, maximum=a.maximum, multiple=a.multiple) for n, a in named.items()},
        opset=ONNX_OPSET,
        census={},
        tolerance=graph.tolerance,
        difference=None,
        program=ProgramRecord(
            target=machine.target(DEVICE),
            ranges=ranges(graph, binding, _shapes(profile)),
            census={},
            seconds=0,
            reproduce="h3trt bench",
        ),
    )


def _regions(binding: Binding) -> tuple[dict[str, Region], ...]:
    """Shapes alone: nothing is read."""
    return tuple({n: Region(0, 0, tuple(s.shape)) for n, s in instance.items()} for instance in binding.instances)


def _file(folder: Path, path: Path) -> FileRecord:
    return FileRecord(path=str(path.relative_to(folder)), sha256=file_sha256(path))
