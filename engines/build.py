"""Builds an engine store from a checkpoint: `build(checkpoint, profile, store)`, incremental and resumable."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import onnx
import torch
from filelock import FileLock, Timeout

from engines.backends import onnxruntime as backend
from engines.declaration import (
    axes,
    describe_checkpoint,
    describe_exporter,
    describe_graph,
    source_hash,
    tensor_record,
    versions,
)
from engines.profile import Partition, Profile
from engines.steps import Ledger, Product, Record, Step, StepEvent, StepReport, content_key
from engines.store import (
    LOCK,
    MANIFEST,
    SCHEMA_VERSION,
    TOKENIZER,
    AxisRecord,
    CheckpointRecord,
    EngineRecord,
    EngineStore,
    Manifest,
    Region,
    WeightFile,
    weight_file,
)
from export.binding import Binding, bind
from export.checkpoint import Checkpoint
from export.compare import compare
from export.emit import emit
from export.emitted import Emitted
from export.graphs.graph import Graph
from export.graphs.t2va import check_consumption, t2va_graphs

COMPUTE = {"float32": torch.float32}
"""A profile's compute dtypes."""

Records = Mapping[str, Record]


class BuildError(ValueError):
    """A build that cannot start; says what does not fit, and what would."""


@dataclass(frozen=True)
class BuildReport:
    """A finished build: every step in order, and the store, which opens."""

    store: Path
    steps: tuple[StepReport, ...]

    @property
    def built(self) -> tuple[str, ...]:
        """Names of the steps that were done; empty when everything was up to date."""
        return tuple(step.name for step in self.steps if step.status == "built")


def build(
    checkpoint: str | Path,
    profile: str | Path,
    store: str | Path,
    progress: Callable[[StepEvent], None] = lambda event: None,
    only: str | None = None,
) -> BuildReport:
    """Brings a store up to date with a checkpoint and a profile, and opens it to see that it can be served from.

    What has not changed is left alone. `only` names one step, which is done again, after those before it where needed;
    the later ones are left for the next build.

    Raises:
        CheckpointError, ProfileError, BuildError: the build cannot start.
        StepFailed: a step failed. What was built stays; a manifest that was there before is still valid.
    """
    root, loaded = Path(store).absolute(), Profile.load(profile)
    plan = _Plan(Checkpoint.open(Path(checkpoint).absolute()), loaded, root)
    steps = plan.steps()
    names = [step.name for step in steps]
    if only is not None and only not in names:
        raise BuildError(f"step {only!r}: must be one of {', '.join(names)}")
    arguments = ["--checkpoint", str(plan.checkpoint.root), "--profile", loaded.name, "--store", str(root)]
    ledger = Ledger(root, lambda step: shlex.join(["h3trt", "engines", *arguments, "--step", step]), progress)
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / LOCK, progress):
        reports = ledger.run(steps, only)
        if only is None:
            ledger.prune(steps)
            EngineStore.open(root)
    return BuildReport(root, tuple(reports))


def _locked(path: Path, progress: Callable[[StepEvent], None]) -> FileLock:
    """The store's lock, held; says so when another build has to be waited for."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(StepEvent(0, 0, f"another build of {path.parent}", "started"))
        lock.acquire()
    return lock


@dataclass(frozen=True)
class _Unit:
    """One graph of the build, with what it depends on."""

    graph: Graph
    binding: Binding
    declaration: dict[str, Any]

    @staticmethod
    def of(graph: Graph) -> _Unit:
        binding = bind(graph)
        return _Unit(graph, binding, describe_graph(graph, binding))

    @property
    def name(self) -> str:
        return self.graph.name

    def shapes(self, instance: int) -> dict[str, tuple[int, ...]]:
        """Shapes of one instance's weights by name."""
        return {name: stored.shape for name, stored in self.binding.instances[instance].items()}

    @cached_property
    def representatives(self) -> list[int]:
        """The first instance of each set of weight shapes."""
        shapes = [self.shapes(i) for i in range(len(self.graph.weights))]
        return [i for i, s in enumerate(shapes) if shapes.index(s) == i]

    @cached_property
    def instance_files(self) -> list[int]:
        """For each instance, which of `representatives` has its weight shapes."""
        shapes = [self.shapes(i) for i in self.representatives]
        return [shapes.index(self.shapes(i)) for i in range(len(self.graph.weights))]


class _Plan:
    """The steps of one build. A graph is built once, from the first partition; the others only bind their weights."""

    def __init__(self, checkpoint: Checkpoint, profile: Profile, root: Path) -> None:
        self.checkpoint = checkpoint
        self.profile = profile
        self.root = root
        if missing := [p for p in profile.partitions if p not in checkpoint.partitions]:
            raise BuildError(
                f"profile {profile.name}: partitions = {list(profile.partitions)}: checkpoint {checkpoint.root} has no "
                f"{missing[0]!r}; must be of {list(checkpoint.partitions)}"
            )
        self._units = {p: [_Unit.of(graph) for graph in self._graphs(p)] for p in profile.partitions}
        self._exporter = describe_exporter()
        self._files = {path: i for i, path in enumerate(sorted(self._weight_paths()))}
        self._weight_files = [weight_file(path) for path in self._files]

    def steps(self) -> list[Step]:
        """Every step, in an order in which each comes after those it requires."""
        first = self.profile.partitions[0]
        steps = [self._bind(partition) for partition in self.profile.partitions]
        for unit in self._units[first]:
            steps += [self._emit(unit, first), self._lower(unit), self._check(unit), self._compare(unit)]
            steps += [self._bake(unit)] if self.profile.weights == "baked" else []
        return [*steps, self._manifest(tuple(step.name for step in steps))]

    def _graphs(self, partition: Partition) -> tuple[Graph, ...]:
        return t2va_graphs(self.checkpoint, partition, COMPUTE[self.profile.compute])

    def _weight_paths(self) -> set[Path]:
        units = (unit for units in self._units.values() for unit in units)
        return {s.file for unit in units for instance in unit.binding.instances for s in instance.values()}

    def _bind(self, partition: Partition) -> Step:
        units = self._units[partition]
        files = {s.file for unit in units for instance in unit.binding.instances for s in instance.values()}
        depends_on = {"graphs": [unit.declaration for unit in units], "files": self._identities(files)}
        return Step(f"{partition}.bind", depends_on, partial(self._do_bind, partition))

    def _do_bind(self, partition: Partition, records: Records) -> Product:
        check_consumption(self.checkpoint, self._graphs(partition))
        first = self.profile.partitions[0]
        for unit, other in zip(self._units[partition], self._units[first], strict=True):
            if unit.declaration != other.declaration:
                raise BuildError(f"graph {unit.name}: is another one in {partition} than in {first}: cannot share engines")
        return Product({unit.name: [self._regions(i) for i in unit.binding.instances] for unit in self._units[partition]})

    def _regions(self, instance: Mapping[str, Any]) -> dict[str, Region]:
        return {name: Region(self._files[s.file], s.offset, tuple(s.shape)) for name, s in instance.items()}

    def _identities(self, files: set[Path]) -> list[Any]:
        """What tells that a weight file is the same as before without reading its data."""
        chosen = [(self._weight_files[self._files[path]], path.stat().st_mtime_ns) for path in sorted(files)]
        return [[file.model_dump(), modified] for file, modified in chosen]

    def _emit(self, unit: _Unit, partition: Partition) -> Step:
        depends_on = {
            "graph": unit.declaration,
            "checkpoint": describe_checkpoint(self.checkpoint, partition),
            "exporter": self._exporter,
        }
        return Step(f"{unit.name}.emit", depends_on, partial(self._do_emit, unit))

    def _do_emit(self, unit: _Unit, records: Records) -> Product:
        emitted = emit(unit.graph)
        facts = {"census": dict(emitted.census), "weights": list(emitted.weight_names)}
        return Product(facts, {f"portable/{unit.name}.{{sha}}.onnx": emitted.model.SerializeToString(deterministic=True)})

    def _lower(self, unit: _Unit) -> Step:
        depends_on = {"backend": source_hash(backend), "versions": versions()}
        return Step(f"{unit.name}.lower", depends_on, partial(self._do_lower, unit), (f"{unit.name}.emit",))

    def _do_lower(self, unit: _Unit, records: Records) -> Product:
        engine = backend.lower(self._model(records[f"{unit.name}.emit"]))
        return Product({}, {f"engines/{unit.name}.{{sha}}.onnx": engine.SerializeToString(deterministic=True)})

    def _check(self, unit: _Unit) -> Step:
        requires = (f"{unit.name}.emit", f"{unit.name}.lower")
        depends_on = {"backend": source_hash(backend), "versions": versions()}
        return Step(f"{unit.name}.check", depends_on, partial(self._do_check, unit), requires)

    def _do_check(self, unit: _Unit, records: Records) -> Product:
        emitted, engine = (self._model(records[f"{unit.name}.{step}"]) for step in ("emit", "lower"))
        opset = next(o.version for o in engine.opset_import if o.domain == "")
        return Product({"census": backend.check(engine, emitted), "opset": opset})

    def _compare(self, unit: _Unit) -> Step:
        instances = [unit.binding.instances[i] for i in unit.representatives]
        depends_on = {
            "exporter": self._exporter,
            "trials": [dict(trial) for trial in unit.graph.trials],
            "tolerance": unit.graph.tolerance,
            "weights": [self._regions(instance) for instance in instances],
            "files": self._identities({s.file for instance in instances for s in instance.values()}),
        }
        return Step(f"{unit.name}.compare", depends_on, partial(self._do_compare, unit), (f"{unit.name}.lower",))

    def _do_compare(self, unit: _Unit, records: Records) -> Product:
        """Compares the engine itself, so that its replaced operators are covered as well."""
        lowered = records[f"{unit.name}.lower"]
        names = tuple(weight.name for weight in unit.binding.inputs)
        engine = Emitted(unit.graph, self._model(lowered), names, unit.binding.instances, {}, unit.binding)
        return Product({"difference": max(compare(engine, instance).worst for instance in unit.representatives)})

    def _bake(self, unit: _Unit) -> Step:
        shapes = [unit.shapes(i) for i in unit.representatives]
        depends_on = {"backend": source_hash(backend), "shapes": shapes}
        return Step(f"{unit.name}.bake", depends_on, partial(self._do_bake, unit), (f"{unit.name}.lower",))

    def _do_bake(self, unit: _Unit, records: Records) -> Product:
        engine = self._model(records[f"{unit.name}.lower"])
        baked = [backend.bake(engine, unit.shapes(i)).SerializeToString(deterministic=True) for i in unit.representatives]
        return Product({}, {f"engines/{unit.name}.baked{i}.{{sha}}.onnx": data for i, data in enumerate(baked)})

    def _manifest(self, requires: tuple[str, ...]) -> Step:
        depends_on = {
            "schema": SCHEMA_VERSION,
            "profile": self.profile.model_dump(),
            "checkpoint": self._checkpoint_record().model_dump(),
            "files": [file.model_dump() for file in self._weight_files],
        }
        return Step("manifest", depends_on, self._do_manifest, requires)

    def _do_manifest(self, records: Records) -> Product:
        ...

    def _model(self, record: Record) -> onnx.ModelProto:
        return onnx.load_model_from_string((self.root / record.files[0].path).read_bytes())
