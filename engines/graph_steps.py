"""The steps that make one graph's engine: emit, lower, check, compare with eager torch, and bake where asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

from engines.backends import onnxruntime as backend
from engines.declaration import axes, describe_exporter, describe_graph, source_hash, tensor_record, versions
from engines.steps import Product, Record, Step
from engines.store import AxisRecord, EngineRecord
from engines.weight_table import WeightTable
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

    def steps(self, checkpoint: Mapping[str, Any], weights: WeightTable, baked: bool) -> list[Step]:
        """The graph's steps in order; `checkpoint` describes its layout and configuration."""
        steps = [self._emit(checkpoint), self._lower(), self._check(), self._compare(weights)]
        return [*steps, self._bake()] if baked else steps

    def engine_record(self, records: Records, baked: bool) -> EngineRecord:
        """The manifest's entry, from the records of the finished steps."""
        files = records[self._name("bake" if baked else "lower")]
        checked = records[self._name("check")].facts
        named = axes(self.graph, self.binding)
        return EngineRecord(
            key=files.key,
            files=files.files,
            instance_files=tuple(self._group(i) if baked else 0 for i in range(len(self.graph.weights))),
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

    def _shapes(self, instance: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(stored.shape) for name, stored in self.binding.instances[instance].items()}

    @cached_property
    def _representatives(self) -> list[int]:
        """The first instance of each set of weight shapes."""
        shapes = [self._shapes(i) for i in range(len(self.graph.weights))]
        return [i for i, each in enumerate(shapes) if shapes.index(each) == i]

    def _group(self, instance: int) -> int:
        """Which of the representatives has the instance's weight shapes."""
        return [self._shapes(i) for i in self._representatives].index(self._shapes(instance))

    def _emit(self, checkpoint: Mapping[str, Any]) -> Step:
        depends_on = {"graph": self.declaration, "checkpoint": checkpoint, "exporter": describe_exporter()}
        return Step(self._name("emit"), depends_on, self._do_emit)

    def _do_emit(self, records: Records) -> Product:
        emitted = emit(self.graph)
        return Product({"census": dict(emitted.census)}, {self._path("portable"): _bytes(emitted.model)})

    def _lower(self) -> Step:
        return Step(self._name("lower"), _describe_backend(), self._do_lower, (self._name("emit"),))

    def _do_lower(self, records: Records) -> Product:
        engine = backend.lower(self._model(records, "emit"))
        return Product({}, {self._path("engines"): _bytes(engine)})

    def _check(self) -> Step:
        requires = (self._name("emit"), self._name("lower"))
        return Step(self._name("check"), _describe_backend(), self._do_check, requires)

    def _do_check(self, records: Records) -> Product:
        engine = self._model(records, "lower")
        census = backend.check(engine, self._model(records, "emit"))
        return Product({"census": census, "opset": next(o.version for o in engine.opset_import if o.domain == "")})

    def _compare(self, weights: WeightTable) -> Step:
        instances = [self.binding.instances[i] for i in self._representatives]
        depends_on = {
            "exporter": describe_exporter(),
            "trials": [dict(trial) for trial in self.graph.trials],
            "tolerance": self.graph.tolerance,
            "weights": [weights.regions(instance) for instance in instances],
            "files": weights.identities(instances),
        }
        return Step(self._name("compare"), depends_on, self._do_compare, (self._name("lower"),))

    def _do_compare(self, records: Records) -> Product:
        """Compares the engine, not the emitted model: the operators that lowering replaced are covered as well."""
        names = tuple(weight.name for weight in self.binding.inputs)
        engine = Emitted(self.graph, self._model(records, "lower"), names, self.binding.instances, {}, self.binding)
        return Product({"difference": max(compare(engine, i).worst for i in self._representatives)})

    def _bake(self) -> Step:
        shapes = [self._shapes(i) for i in self._representatives]
        return Step(self._name("bake"), {**_describe_backend(), "shapes": shapes}, self._do_bake, (self._name("lower"),))

    def _do_bake(self, records: Records) -> Product:
        engine = self._model(records, "lower")
        baked = [_bytes(backend.bake(engine, self._shapes(i))) for i in self._representatives]
        return Product({}, {self._path("engines", f".baked{n}"): data for n, data in enumerate(baked)})

    def _path(self, directory: str, suffix: str = "") -> str:
        return f"{directory}/{self.graph.name}{suffix}.{{sha}}.onnx"

    def _model(self, records: Records, step: str) -> onnx.ModelProto:
        return onnx.load_model_from_string((self._store / records[self._name(step)].files[0].path).read_bytes())


def _describe_backend() -> dict[str, Any]:
    return {"backend": source_hash(backend), "versions": versions()}


def _bytes(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)
