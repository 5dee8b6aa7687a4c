"""A graph's steps for ONNX Runtime: emit, lower, check, compare with eager torch, and bake where asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from engines.backends import onnxruntime as backend
from engines.declaration import describe_backend
from engines.graph_steps import GraphSteps, Records, model_bytes
from engines.profile import Partition
from engines.steps import Product, Step
from engines.store import FileRecord
from engines.weight_table import WeightTable
from export.bake import bake


class OnnxRuntimeSteps(GraphSteps):
    """The engine is compared, not the emitted model: the operators that lowering replaced are covered as well."""

    def steps(self, checkpoint: Mapping[str, Any], exporter: Mapping[str, Any], weights: WeightTable) -> list[Step]:
        """Emit, lower, check, compare."""
        return [
            self._emit(checkpoint, exporter),
            self._lower(),
            self._check(),
            self._compare(exporter, weights, "lower"),
        ]

    def bake_steps(self, partition: Partition, weights: WeightTable) -> list[Step]:
        """One step for all instances: their models have no data, only the places of it."""
        depends_on = {"regions": [weights.regions(i) for i in self.binding.instances], "files": weights.files_json}
        return [Step(self._bake_name(partition), depends_on, partial(self._do_bake, partition), (self._name("lower"),))]

    @property
    def last(self) -> str:
        return self._name("lower")

    def _plan(self, records: Records) -> None:
        return None

    def _engine_file(self, records: Records) -> FileRecord:
        return records[self.last].files[0]

    def _baked_files(self, partition: Partition, records: Records) -> tuple[FileRecord, ...]:
        name = self._bake_name(partition)
        return records[name].files if name in records else ()

    def _census(self, records: Records) -> dict[str, int]:
        return records[self._name("check")].facts["census"]

    def _bake_name(self, partition: Partition) -> str:
        return self._name(f"bake.{partition}")

    def _lower(self) -> Step:
        return Step(self.last, describe_backend(backend), self._do_lower, (self._name("emit"),))

    def _do_lower(self, records: Records) -> Product:
        engine = backend.lower(self._model(records, "emit"))
        return Product({}, {self._path("engines", ".onnx"): model_bytes(engine)})

    def _check(self) -> Step:
        requires = (self._name("emit"), self._name("lower"))
        return Step(self._name("check"), describe_backend(backend), self._do_check, requires)

    def _do_check(self, records: Records) -> Product:
        return Product({"census": backend.check(self._model(records, "lower"), self._model(records, "emit"))})

    def _do_bake(self, partition: Partition, records: Records) -> Product:
        engine = self._emitted(records, "lower")
        models = [bake(engine, i) for i in range(len(self.binding.instances))]
        paths = [self._path(f"engines/{partition}", f".{i}.onnx") for i in range(len(models))]
        return Product({}, {path: model_bytes(model) for path, model in zip(paths, models, strict=True)})
