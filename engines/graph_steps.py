"""The steps that make one graph's engine, whatever the backend: emit, and what that backend makes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

from engines.declaration import axes, describe_graph, tensor_record, versions
from engines.profile import PARTITIONS, Partition
from engines.steps import Product, Record, Step
from engines.store import AxisRecord, EngineRecord, FileRecord, PlanRecord, ProgramRecord
from engines.weight_table import WeightTable
from export.binding import Binding
from export.checkpoint.holes import lacks_data
from export.compare import compare
from export.emit import census, emit
from export.emitted import Emitted
from export.graphs.graph import Graph

Records = Mapping[str, Record]


class GraphSteps(ABC):
    """One graph in a build. `store` is the directory that finished steps' files are read from."""

    def __init__(self, graph: Graph, binding: Binding, store: Path) -> None:
        self.graph = graph
        self.binding = binding
        self.declaration = describe_graph(graph, binding)
        self._store = store

    @abstractmethod
    def steps(self, checkpoint: Mapping[str, Any], exporter: Mapping[str, Any], weights: WeightTable) -> list[Step]:
        """The steps to an engine with bound weights.

        `checkpoint` describes its layout and configuration, `exporter` the code that emits and compares.
        """

    @abstractmethod
    def bake_steps(self, partition: Partition, weights: WeightTable) -> list[Step]:
        """The steps to an engine for each of the partition's instances, its weights inside."""

    @abstractmethod
    def _plan(self, records: Records) -> PlanRecord | None:
        """What the backend has to say of the engine, if it is a plan."""

    def _program(self, records: Records) -> ProgramRecord | None:
        """What the engine was compiled for, if it is a compiled program."""
        return None

    @abstractmethod
    def _engine_file(self, records: Records) -> FileRecord:
        """The engine with bound weights."""

    @abstractmethod
    def _baked_files(self, partition: Partition, records: Records) -> tuple[FileRecord, ...]:
        """The engines with weights inside, by instance; none where nothing was baked."""

    def engine_record(self, records: Records) -> EngineRecord:
        """The manifest's entry, from the records of the finished steps."""
        named = axes(self.graph, self.binding)
        baked = {p: self._baked_files(p, records) for p in PARTITIONS}
        model = self._model(records, "emit")
        return EngineRecord(
            key=records[self.last].key,
            file=self._engine_file(records),
            baked={partition: files for partition, files in baked.items() if files},
            instances=len(self.graph.weights),
            inputs=tuple(tensor_record(spec) for spec in self.graph.inputs),
            outputs=tuple(tensor_record(spec) for spec in self.graph.outputs),
            weights=tuple(tensor_record(spec) for spec in self.binding.inputs),
            axes={n: AxisRecord(minimum=a.minimum, maximum=a.maximum, multiple=a.multiple) for n, a in named.items()},
            opset=next(o.version for o in model.opset_import if o.domain == ""),
            census=self._census(records),
            tolerance=self.graph.tolerance,
            difference=records[self._name("compare")].facts["difference"],
            plan=self._plan(records),
            program=self._program(records),
        )

    @property
    @abstractmethod
    def last(self) -> str:
        """Name of the step that makes the engine."""

    @abstractmethod
    def _census(self, records: Records) -> dict[str, int]:
        """Operators of the model that the engine is made of, counted as "domain::Op"."""

    def _name(self, step: str) -> str:
        return f"{self.graph.name}.{step}"

    @cached_property
    def _representatives(self) -> list[int]:
        """The first instance of each set of weight shapes."""
        shapes = [[stored.shape for stored in instance.values()] for instance in self.binding.instances]
        return [i for i, each in enumerate(shapes) if shapes.index(each) == i]

    def _emit(self, checkpoint: Mapping[str, Any], exporter: Mapping[str, Any]) -> Step:
        depends_on = {"graph": self.declaration, "checkpoint": checkpoint, "source": exporter["source"]}
        return Step(self._name("emit"), depends_on, self._do_emit, here={"versions": exporter["versions"]})

    def _do_emit(self, records: Records) -> Product:
        model = emit(self.graph).model
        return Product(
            {"census": census(model), "versions": versions()}, {self._path("portable", ".onnx"): model_bytes(model)}
        )

    def _compare(self, exporter: Mapping[str, Any], weights: WeightTable, made_by: str) -> Step:
        """Compares what the step `made_by` made with eager torch, on each set of weight shapes."""
        instances = [self.binding.instances[i] for i in self._representatives]
        depends_on = {
            "source": exporter["source"],
            "trials": [dict(trial) for trial in self.graph.trials],
            "tolerance": self.graph.tolerance,
            "contents": weights.contents(instances),
        }
        here = {
            "versions": exporter["versions"],
            "weights": [weights.regions(instance) for instance in instances],
            "files": weights.identities(instances),
        }
        return Step(
            self._name("compare"),
            depends_on,
            lambda records: self._do_compare(made_by, records),
            (self._name(made_by), *weights.made_by(instances)),
            here,
        )

    def _do_compare(self, made_by: str, records: Records) -> Product:
        """Weights without data, of a checkpoint made for its dimensions, say nothing and need not even be finite."""
        emitted = self._emitted(records, made_by)
        files = {stored.file for i in self._representatives for stored in self.binding.instances[i].values()}
        if files and all(map(lacks_data, files)):
            return Product({"difference": None})
        return Product({"difference": max(compare(emitted, i).worst for i in self._representatives)})

    def _emitted(self, records: Records, made_by: str) -> Emitted:
        return Emitted(self.graph, self._model(records, made_by), self.binding, {})

    def _path(self, directory: str, suffix: str) -> str:
        return f"{directory}/{self.graph.name}.{{sha}}{suffix}"

    def _model(self, records: Records, step: str) -> onnx.ModelProto:
        return onnx.load_model_from_string(self._model_file(records, step).read_bytes())

    def _model_file(self, records: Records, step: str) -> Path:
        return self._store / records[self._name(step)].files[0].path


def model_bytes(model: onnx.ModelProto) -> bytes:
    """The same bytes for the same model."""
    return model.SerializeToString(deterministic=True)


def single_file(records: Records, names: Iterable[str]) -> tuple[FileRecord, ...]:
    """The first file of each of those steps that has been done."""
    return tuple(records[name].files[0] for name in names if name in records)
