"""Engines at released dimensions without a checkpoint's data: compiled here, their weights drawn on the device."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engines import machine
from engines.adapters import ADAPTED, AdapterMode, has_sides, low_rank_name, weights_key
from engines.backends.inductor import compile_graph
from engines.declaration import axes, describe_exporter, describe_graph, tensor_record
from engines.graphs import profile_graphs
from engines.inductor_steps import compiled_from, compiled_ranges
from engines.profile import Adapters, Partition, Profile, Ranks
from engines.quality import weights_of
from engines.sessions.backend import Opening
from engines.sessions.dtypes import TORCH
from engines.sessions.engine_set import EngineSet
from engines.sessions.gpu import CudaGpu
from engines.sessions.inductor import InductorEngines
from engines.sessions.weights import aligned_offsets
from engines.steps import content_key
from engines.store import (
    SCHEMA_VERSION,
    AdapterRecord,
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
from engines.switchable import Switchable, switchables
from export.artifacts.artifact import Artifact
from export.artifacts.base import RELEASED
from export.artifacts.read import read_artifact
from export.binding import Binding, bind
from export.checkpoint import Checkpoint
from export.graphs.graph import Graph
from export.miniature import write_sparse_released
from export.miniature.artifacts import FOLDERS, write_artifacts
from plugins.distilled import Distilled, PinnedSchedule
from plugins.op import ONNX_OPSET

PARTITION: Partition = "fl2va"

DEVICE = torch.device("cuda", 0)

WEIGHT_DEVIATION = 0.02
"""Standard deviation of matrices' elements."""

ARTIFACTS = "artifacts"
"""Folder of the artifacts' files."""

LONGEST = ("video_decoder_tile", "video_encoder_tile", "audio_decoder", "audio_encoder")
"""Graphs of thousands of operators, which take minutes to compile."""

E4M3_DEVIATION = 100.0
"""Standard deviation of 8-bit elements, whose largest is 448; their scales make up for it."""


@dataclass(frozen=True)
class Wanted:
    """Graphs of a profile, by their names; `baked`: with random weights in their packages.

    `adapters`: those that the store offers, by name; all are changes of the same linears, and have random weights.
    """

    profile: Profile
    names: tuple[str, ...]
    baked: bool = False
    adapters: tuple[tuple[str, AdapterMode], ...] = ()


def shared_by(profile: Profile, ranks: Ranks) -> Profile:
    """The first tier of a profile on as many GPUs as its stages are to have ranks."""
    changes = {"gpus": ranks.processes, "ranks": ranks, "quality": {}}
    return Profile.model_validate(profile.model_dump() | changes)


def synthetic_store(wanted: Wanted, folder: Path) -> EngineStore:
    """A store at released dimensions: lists all graphs of the profile, and has packages of the wanted ones."""
    compile_packages(folder, (wanted,))
    return EngineStore(folder, _manifest(wanted, _checkpoint(folder), folder, _listed(wanted, folder)))


def compile_packages(folder: Path, wanted: Iterable[Wanted], processes: int = 14) -> dict[str, float]:
    """Compiles what is not yet there, side by side; seconds of each package by its file's name.

    Raises:
        RuntimeError: some do not compile; the others are there.
    """
    _checkpoint(folder)  # before processes would each write it
    missing = {}
    for each in wanted:
        for graph in graphs(each, folder):
            target = package(folder, graph, each)
            if not target.exists():
                missing[target.name] = _Compilation(graph.name, each, folder, target)
    if not missing:
        return {}
    # Processes of their own: the compiler keeps state, and each wants a processor. What takes longest begins first.
    context = multiprocessing.get_context("spawn")
    order = sorted(missing.values(), key=lambda each: each.graph not in LONGEST)
    with ProcessPoolExecutor(min(processes, len(order)), mp_context=context) as pool:
        running = {each.target.name: pool.submit(each.run) for each in order}
    failed = {name: future.exception() for name, future in running.items() if future.exception()}
    if failed:
        raise RuntimeError("\n".join(f"{name}: {error}" for name, error in failed.items()))
    return {name: future.result() for name, future in running.items()}


def open_engines(store: EngineStore, names: tuple[str, ...], weights: RandomWeights | None = None) -> EngineSet:
    """Those engines of a store on the GPU, with random weights."""
    drawn = weights or RandomWeights(store.manifest, names)
    backend = InductorEngines(Opening(store, names, (PARTITION,)), drawn, CudaGpu(DEVICE))
    return EngineSet(store, names, (PARTITION,), backend)


@dataclass
class RandomWeights:
    """Weights of some of a manifest's graphs, drawn on the device when they are first bound, and kept."""

    manifest: Manifest
    graphs: tuple[str, ...]
    seed: int = 0
    _drawn: dict[tuple[str, str, int], dict[str, torch.Tensor]] = field(default_factory=dict)

    @contextmanager
    def tensors(
        self, graph: str, instance: int, partition: Partition, adapter: str | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Every weight of an instance."""
        own = self._once(weights_of(graph), PARTITION, instance, None)
        yield own | self._once(weights_of(graph), weights_key(PARTITION, adapter), instance, adapter)

    def load_lasting(self) -> None:
        """Draws the weights of every instance of those graphs, adapters' among them."""
        for graph in {weights_of(name) for name in self.graphs}:
            for instance in range(self.manifest.graphs[graph].instances):
                for adapter in (None, *self.manifest.adapters):
                    if adapter is None or self.manifest.changes(adapter, graph):
                        with self.tensors(graph, instance, PARTITION, adapter):
                            pass

    def leave(self, graphs: Collection[str]) -> None:
        """All weights stay."""

    def _once(self, graph: str, bound_as: str, instance: int, adapter: str | None) -> dict[str, torch.Tensor]:
        key = graph, bound_as, instance
        if key not in self._drawn:
            self._drawn[key] = self._draw(*key, adapter)
        return self._drawn[key]

    def _draw(self, graph: str, bound_as: str, instance: int, adapter: str | None) -> dict[str, torch.Tensor]:
        """In one piece of memory, as a session keeps them."""
        place = 0 if adapter is None else 1 + list(self.manifest.adapters).index(adapter)
        generator = torch.Generator(DEVICE).manual_seed(self.seed + 1000 * instance + place)
        regions = self.manifest.bindings[bound_as][graph][instance]
        engine = self.manifest.graphs[self.manifest.engine_of(graph, adapter)]
        specs = [spec for spec in engine.weights if spec.name in regions]
        sizes = [math.prod(regions[spec.name].shape) * TORCH[spec.dtype].itemsize for spec in specs]
        offsets = aligned_offsets(sizes)
        memory = torch.empty(offsets[-1], dtype=torch.uint8, device=DEVICE)
        drawn = {}
        for spec, size, offset in zip(specs, sizes, offsets, strict=False):
            weight = memory[offset : offset + size].view(TORCH[spec.dtype]).view(regions[spec.name].shape)
            drawn[spec.name] = draw_weight(spec, weight, generator)
        return drawn


def draw_weight(spec: TensorRecord, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fills a weight: matrices about 0, norms about 1, and the scales of 8-bit matrices."""
    if weight.dtype == torch.float8_e4m3fn:
        # In parts: what cannot be drawn as it is passes through a wider type.
        for part in weight.split(512):
            part.copy_(_drawn(tuple(part.shape), torch.float16, E4M3_DEVIATION, generator).clamp_(-448, 448))
        return weight
    if spec.name.endswith("_scale"):
        return weight.fill_(WEIGHT_DEVIATION / E4M3_DEVIATION)
    weight.normal_(0, WEIGHT_DEVIATION, generator=generator)
    return weight.add_(1) if weight.ndim == 1 and spec.name.endswith("weight") else weight


def draw_input(
    spec: TensorRecord, sizes: Mapping[str, int], generator: torch.Generator, below: int = 1
) -> torch.Tensor:
    """An input on the generator's device: standard normal, or integers below a bound."""
    shape = tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape)
    if TORCH[spec.dtype].is_floating_point:
        return _drawn(shape, TORCH[spec.dtype], 1.0, generator)
    return torch.randint(below, shape, dtype=TORCH[spec.dtype], device=generator.device, generator=generator)


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, deviation: float, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=generator.device).normal_(0, deviation, generator=generator)


def _checkpoint(folder: Path) -> Checkpoint:
    """The release's sizes, and artifacts for them, in files without data."""
    path = folder / "checkpoint"
    if not path.exists():
        write_sparse_released(path, "native")
    if not (folder / ARTIFACTS).exists():
        write_artifacts(folder / ARTIFACTS, RELEASED.config, seed=None)
    return Checkpoint.open(path)


def graphs(wanted: Wanted, folder: Path) -> tuple[Graph, ...]:
    """The wanted graphs at released dimensions."""
    return tuple(graph for graph in _listed(wanted, folder) if graph.name in wanted.names)


def _listed(wanted: Wanted, folder: Path) -> tuple[Graph, ...]:
    """All graphs of the profile, and, for adapters, those with low-rank sides."""
    own = profile_graphs(_checkpoint(folder), wanted.profile, PARTITION, folder / "weights")
    return (*own, *(graph for one in _low_rank(wanted, folder) for graph in one.graphs))


def _low_rank(wanted: Wanted, folder: Path) -> tuple[Switchable, ...]:
    """What every adapter with low-rank sides is, of a published one's sizes; none where none is wanted."""
    if all(mode != "low_rank" for _, mode in wanted.adapters):
        return ()
    checkpoint, artifact = _checkpoint(folder), read_artifact(folder / ARTIFACTS / FOLDERS["turbo_4step"])
    assert isinstance(artifact, Artifact)  # as the file of an adapter is
    profile = wanted.profile.model_copy(update={"adapters": Adapters(mode="low_rank")})
    return switchables(checkpoint, profile, [artifact], folder / "weights")


def _drawn_on_host(binding: Binding) -> list[torch.Tensor]:
    """Weights of the first instance, for a package of bfloat16 weights."""
    generator, stored = torch.Generator().manual_seed(0), binding.instances[0]
    shapes = [stored[spec.name].shape for spec in binding.inputs]
    return [
        draw_weight(tensor_record(spec), torch.empty(shape, dtype=spec.dtype), generator)
        for spec, shape in zip(binding.inputs, shapes, strict=True)
    ]


def package(folder: Path, graph: Graph, wanted: Wanted) -> Path:
    """Where a package lies: its name tells all that it is made of, so that another source makes another file."""
    binding = bind(graph)
    parts = describe_graph(graph, binding), _exporter()["source"], compiled_from(graph, binding, wanted.profile)
    if wanted.baked:
        return folder / f"{graph.name}.baked.{content_key(*parts)[:16]}.pt2"
    return folder / f"{graph.name}.{content_key(*parts)[:16]}.pt2"


@cache
def _exporter() -> dict[str, Any]:
    return describe_exporter()


@dataclass(frozen=True)
class _Compilation:
    """A package to be made by a process of its own."""

    graph: str
    wanted: Wanted
    folder: Path
    target: Path

    def run(self) -> float:
        """Seconds that it takes."""
        started, profile = time.monotonic(), self.wanted.profile
        (graph,) = graphs(replace(self.wanted, names=(self.graph,)), self.folder)
        binding = bind(graph)
        work = self.target.parent / f"work.{self.target.name}"
        work.mkdir(parents=True, exist_ok=True)
        stored = _drawn_on_host(binding) if self.wanted.baked else None
        compile_graph(graph, binding, compiled_ranges(graph, binding, profile), DEVICE, work / "program.pt2", stored)
        (work / "program.pt2").replace(self.target)
        return time.monotonic() - started


def _manifest(wanted: Wanted, checkpoint: Checkpoint, folder: Path, listed: Sequence[Graph]) -> Manifest:
    bindings = {graph.name: bind(graph) for graph in listed}
    bound: dict[str, dict[str, Bound]] = {
        PARTITION: {name: _regions(binding) for name, binding in bindings.items() if not has_sides(name)}
    }
    bound |= {weights_key(PARTITION, name): _changed(mode, bindings) for name, mode in wanted.adapters}
    return Manifest(
        schema_version=SCHEMA_VERSION,
        profile=wanted.profile,
        versions={"inductor": str(torch.__version__)},
        checkpoint=CheckpointRecord(root=str(checkpoint.root), layout=checkpoint.layout, fingerprint="synthetic"),
        dimensions=checkpoint.dimensions,
        tokenizer=_file(folder, checkpoint.tokenizer_file),
        graphs={g.name: _record(wanted, folder, g, bindings[g.name]) for g in listed},
        weight_files=(),
        bindings=bound,
        adapters={name: _adapter(name, mode) for name, mode in wanted.adapters},
    )


def _changed(mode: AdapterMode, bindings: Mapping[str, Binding]) -> dict[str, Bound]:
    """An adapter's own weights of each graph."""
    own = {graph: _regions(bindings[graph]) for graph in ADAPTED if graph in bindings}
    if mode == "merged":
        return own
    with_sides = {graph: _regions(bindings[low_rank_name(graph)]) for graph in own}
    return {
        graph: tuple({name: r for name, r in instance.items() if name not in own[graph][0]} for instance in instances)
        for graph, instances in with_sides.items()
    }


def _adapter(name: str, mode: AdapterMode) -> AdapterRecord:
    schedule = PinnedSchedule(forwards=4, video_shift=12.0, audio_shift=3.0)
    distilled = Distilled(name=name, family="turbo", tasks=("t2va",), schedule=schedule)
    return AdapterRecord(distilled=distilled, partition=PARTITION, mode=mode, path="", modulates=False)


def _record(wanted: Wanted, folder: Path, graph: Graph, binding: Binding) -> EngineRecord:
    named, file = axes(graph, binding), package(folder, graph, wanted)
    return EngineRecord(
        key="synthetic",
        file=_file(folder, file) if graph.name in wanted.names else FileRecord(path=file.name, sha256=""),
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
            ranges=compiled_ranges(graph, binding, wanted.profile),
            census={},
            seconds=0,
            reproduce="h3trt bench",
        ),
    )


Bound = tuple[dict[str, Region], ...]
"""The weights of each instance of a graph."""


def _regions(binding: Binding) -> Bound:
    """Shapes alone: nothing is read."""
    return tuple({n: Region(0, 0, tuple(s.shape)) for n, s in instance.items()} for instance in binding.instances)


def _file(folder: Path, path: Path) -> FileRecord:
    return FileRecord(path=str(path.relative_to(folder)), sha256=file_sha256(path))
