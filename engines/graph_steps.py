"""The steps that make one graph's engine: emit, lower, check, compare with eager torch, and bake where asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import onnx

from engines.backends import onnxruntime as backend
from engines.declaration import axes, describe_backend, describe_graph, tensor_record
from engines.profile import PARTITIONS, Partition
from engines.steps import Product, Record, Step
from engines.store import AxisRecord, EngineRecord
from engines.weight_table import WeightTable
from export.bake import bake
from export.binding import Binding
from export.compare import compare
from export.emit import emit
from export.emitted import Emitted
from export.graphs.graph import Graph

Records = Mapping[str, Record]


class GraphSteps:
    """One graph in a build. `store` is the directory that finished steps' files are read from."""

    def __init__(self, graph: Graph, binding: Binding, store: Path) -> None:
        self.graph = graph
        self.binding = binding
        self.declaration = describe_graph(graph, binding)
        self._store = store

    def steps(self, checkpoint: Mapping[str, Any], exporter: Mapping[str, Any], weights: WeightTable) -> list[Step]:
        """The steps to an engine with bound weights.

        `checkpoint` describes its layout and configuration, `exporter` the code that emits and compares.
        """
        return [self._emit(checkpoint, exporter), self._lower(), self._check(), self._compare(exporter, weights)]

    def bake_step(self, partition: Partition, weights: WeightTable) -> Step:
        """The step from that engine to one for each of the partition's instances, its weights inside."""
        depends_on = {"regions": [weights.regions(i) for i in self.binding.instances], "files": weights.files_json}
        return Step(self._bake_name(partition), depends_on, partial(self._do_bake, partition), (self._name("lower"),))

    def engine_record(self, records: Records) -> EngineRecord:
        """The manifest's entry, from the records of the finished steps."""
        lowered, checked = records[self._name("lower")], records[self._name("check")].facts
        named = axes(self.graph, self.binding)
        baked = {p: records[self._bake_name(p)].files for p in PARTITIONS if self._bake_name(p) in records}
        return EngineRecord(
            key=lowered.key,
            file=lowered.files[0],
            baked=baked,
            instances=len(self.graph.weights),
            inputs=tuple(tensor_record(spec) for spec in self.graph.inputs),
            outputs=tuple(tensor_record(spec) for spec in self.graph.outputs),
            weights=tuple(tensor_record(spec) for spec in self.binding.inputs),
            axes={n: AxisRecord(minimum=a.minimum, maximum=a.maximum, multiple=a.multiple) for n, a in named.items()},
            opset=checked["opset"],
            census=checked["census"],
            tolerance=self.graph.tolerance,
            difference=records[self._name("compare")].facts["difference"],
        )

    def _name(self, step: str) -> str:
        return f"{self.graph.name}.{step}"

    def _bake_name(self, partition: Partition) -> str:
        return self._name(f"bake.{partition}")

    @cached_property
    def _representatives(self) -> list[int]:
        """The first instance of each set of weight shapes."""
        shapes = [[stored.shape for stored in instance.values()] for instance in self.binding.instances]
        return [i for i, each in enumerate(shapes) if shapes.index(each) == i]

    def _emit(self, checkpoint: Mapping[str, Any], exporter: Mapping[str, Any]) -> Step:
        depends_on = {"graph": self.declaration, "checkpoint": checkpoint, "exporter": exporter}
        return Step(self._name("emit"), depends_on, self._do_emit)

    def _do_emit(self, records: Records) -> Product:
        emitted = emit(self.graph)
        return Product({"census": dict(emitted.census)}, {self._path("portable"): _bytes(emitted.model)})

    def _lower(self) -> Step:
        return Step(self._name("lower"), describe_backend(backend), self._do_lower, (self._name("emit"),))

    def _do_lower(self, records: Records) -> Product:
        engine = backend.lower(self._model(records, "emit"))
        return Product({}, {self._path("engines"): _bytes(engine)})

    def _check(self) -> Step:
        requires = (self._name("emit"), self._name("lower"))
        return Step(self._name("check"), describe_backend(backend), self._do_check, requires)

    def _do_check(self, records: Records) -> Product:
        engine = self._model(records, "lower")
        census = backend.check(engine, self._model(records, "emit"))
        return Product({"census": census, "opset": next(o.version for o in engine.opset_import if o.domain == "")})

    def _compare(self, exporter: Mapping[str, Any], weights: WeightTable) -> Step:
        instances = [self.binding.instances[i] for i in self._representatives]
        depends_on = {
            "exporter": exporter,
            "trials": [dict(trial) for trial in self.graph.trials],
            "tolerance": self.graph.tolerance,
            "weights": [weights.regions(instance) for instance in instances],
            "files": weights.identities(instances),
        }
        return Step(self._name("compare"), depends_on, self._do_compare, (self._name("lower"),))

    def _do_compare(self, records: Records) -> Product:
        """Compares the engine, not the emitted model: the operators that lowering replaced are covered as well."""
        engine = self._engine(records)
        return Product({"difference": max(compare(engine, i).worst for i in self._representatives)})

    def _do_bake(self, partition: Partition, records: Records) -> Product:
        engine = self._engine(records)
        models = [bake(engine, i) for i in range(len(self.binding.instances))]
        return Product({}, {self._path(f"engines/{partition}", f".{i}"): _bytes(m) for i, m in enumerate(models)})

    def _engine(self, records: Records) -> Emitted:
        return Emitted(self.graph, self._model(records, "lower"), self.binding, {})

    def _path(self, directory: str, suffix: str = "") -> str:
        return f"{directory}/{self.graph.name}{suffix}.{{sha}}.onnx"

    def _model(self, records: Records, step: str) -> onnx.ModelProto:
        return onnx.load_model_from_string((self._store / records[self._name(step)].files[0].path).read_bytes())


def _bytes(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)
