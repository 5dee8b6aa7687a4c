"""A graph's steps for TensorRT: emit, compare with eager torch, build the plan, and one an instance where baked.

The plan can be built on another machine than the rest: TensorRT-RTX builds for a GPU that is not there, TensorRT times
its kernels on the one that is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from engines import layers, tensorrt
from engines.backend import BackendMissing, backend_version, installed
from engines.backends import tensorrt as backend
from engines.backends.tensorrt.expectation import expected
from engines.backends.tensorrt.lowering import PLUGINS
from engines.backends.tensorrt.process import build_plan
from engines.backends.tensorrt.request import Constant, PlanRequest, PlanResult
from engines.backends.tensorrt.shapes import optimisation_profiles
from engines.build_host import missing_gpu
from engines.declaration import axes, describe_backend
from engines.graph_steps import GraphSteps, Records, model_bytes, single_file
from engines.plan.plan import STAGE_OF, Plan
from engines.profile import Partition, Profile, component_of
from engines.steps import RECORDS, Deferred, Product, Step, Work
from engines.store import AxisRange, FileRecord, PlanRecord
from engines.weight_table import WeightTable
from export.bake import bake
from export.binding import Binding
from export.graphs.graph import Graph
from export.passes.native_fp4 import native_fp4


class TensorRTSteps(GraphSteps):
    """A graph for a profile's GPUs. `reproduce` gives the command that does one step alone."""

    def __init__(
        self,
        graph: Graph,
        binding: Binding,
        store: Path,
        profile: Profile,
        plan: Plan,
        reproduce: Callable[[str], str],
        work: Work,
    ) -> None:
        super().__init__(graph, binding, store)
        self._profile = profile
        self._stage = plan.stage(STAGE_OF[component_of(graph.name)])
        self._limit = plan.limit
        self._reproduce = reproduce
        self._work = work

    def steps(self, checkpoint: Mapping[str, Any], exporter: Mapping[str, Any], weights: WeightTable) -> list[Step]:
        """Emit, compare, plan."""
        plan = Step(self.last, self._plan_depends_on, partial(self._do_plan, None), (self._name("emit"),))
        return [self._emit(checkpoint, exporter), self._compare(exporter, weights, "emit"), plan]

    def bake_steps(self, partition: Partition, weights: WeightTable) -> list[Step]:
        """A step for each instance, since each one writes its weights."""
        return [self._bake(partition, instance, weights) for instance in range(len(self.binding.instances))]

    @property
    def last(self) -> str:
        return self._name("plan")

    def _plan(self, records: Records) -> PlanRecord:
        facts = records[self.last].facts
        return PlanRecord.model_validate(
            {**facts, "layers": records[self.last].files[1].model_dump(), "reproduce": self._reproduce(self.last)}
        )

    def _engine_file(self, records: Records) -> FileRecord:
        return records[self.last].files[0]

    def _baked_files(self, partition: Partition, records: Records) -> tuple[FileRecord, ...]:
        return single_file(records, (self._bake_name(partition, i) for i in range(len(self.binding.instances))))

    def _census(self, records: Records) -> dict[str, int]:
        return records[self._name("emit")].facts["census"]

    def _bake_name(self, partition: Partition, instance: int) -> str:
        return self._name(f"bake.{partition}.{instance}")

    def _bake(self, partition: Partition, instance: int, weights: WeightTable) -> Step:
        bound = self.binding.instances[instance]
        depends_on = {
            **self._plan_depends_on,
            "regions": weights.regions(bound),
            "files": weights.identities([bound]),
        }
        requires = (self._name("emit"), *weights.made_by([bound]))
        return Step(
            self._bake_name(partition, instance),
            depends_on,
            partial(self._do_plan, (partition, instance)),
            requires,
        )

    @cached_property
    def _plan_depends_on(self) -> dict[str, Any]:
        return {
            "backend": self._profile.backend,
            "version": installed(self._profile.backend),
            **self._built_for,
            "workspace": self._workspace,
            "source": describe_backend(backend, layers, tensorrt),
        }

    def _do_plan(self, baked: tuple[Partition, int] | None, records: Records) -> Product:
        if reason := _put_off(self._profile):
            raise Deferred(reason)
        name = self.last if baked is None else self._bake_name(*baked)
        work = self._work.directory(name)
        plan = work / "plan"
        result = build_plan(self._request(records, work, baked), plan, partial(self._work.report, name))
        return self._product(result, plan, baked)

    def _request(self, records: Records, work: Path, baked: tuple[Partition, int] | None) -> PlanRequest:
        assert self._profile.backend in ("tensorrt", "tensorrt_rtx")  # as builds choose these steps
        constants = {} if baked is None else self._constants(baked[1])
        emitted = self._model(records, "emit")
        model = emitted if baked is None else bake(self._emitted(records, "emit"), baked[1])
        file = work / "model.onnx"
        file.write_bytes(model_bytes(native_fp4(model)))
        return PlanRequest(
            graph=self.graph.name,
            flavour=self._profile.backend,
            model=file,
            capabilities=self._capabilities,
            profiles=self._ranges,
            constants=constants,
            workspace_bytes=self._workspace,
            timing_cache=self._store / RECORDS / "timing.cache",
            expected=expected(native_fp4(emitted), PLUGINS if self._profile.backend == "tensorrt" else ()),
        )

    def _constants(self, instance: int) -> dict[str, Constant]:
        bound = self.binding.instances[instance]
        return {name: Constant(file=s.file, offset=s.offset, nbytes=s.nbytes) for name, s in bound.items()}

    def _product(self, result: PlanResult, plan: Path, baked: tuple[Partition, int] | None) -> Product:
        listed = json.dumps([layer.model_dump(mode="json") for layer in result.layers], indent=1).encode()
        told = set(PlanRecord.model_fields) & set(PlanResult.model_fields) - {"layers"}
        facts = {**self._built_for, **result.model_dump(mode="json", include=told)}
        directory, suffix = ("engines", "") if baked is None else (f"engines/{baked[0]}", f".{baked[1]}")
        return Product(
            facts,
            {
                self._path(directory, f"{suffix}.plan"): plan,
                self._path(directory, f"{suffix}.layers.json"): listed,
            },
        )

    @property
    def _built_for(self) -> dict[str, Any]:
        """Compute capabilities and optimisation profiles, as JSON values."""
        ranges = [{name: axis.model_dump() for name, axis in each.items()} for each in self._ranges]
        return {"capabilities": self._capabilities, "profiles": ranges}

    @property
    def _workspace(self) -> int:
        """What the plan leaves for the engine's own memory while its stage runs; TensorRT counts all of it."""
        stage = self._stage
        return self._limit - (stage.peak - stage.activations - stage.workspace)

    @property
    def _capabilities(self) -> tuple[str, ...]:
        assert self._profile.device is not None  # a profile on GPUs has one
        return (self._profile.device.capability,)

    @property
    def _ranges(self) -> tuple[dict[str, AxisRange], ...]:
        named = axes(self.graph, self.binding)
        return optimisation_profiles(named, self._profile.axis_ends)


def _put_off(profile: Profile) -> str | None:
    """Why this machine cannot build the profile's plans; None if it can."""
    try:
        backend_version(profile.backend)
    except BackendMissing as missing:
        return str(missing)
    if profile.backend == "tensorrt_rtx":
        return None
    assert profile.device is not None  # a profile on GPUs has one
    lacking = missing_gpu(profile.device)
    return None if lacking is None else f"TensorRT times its kernels on the GPU that they are for, {lacking}"
