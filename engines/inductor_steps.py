"""A graph's steps for inductor: emit, compare with eager torch, compile on the host whose device it is for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from engines import backends, machine
from engines.backend import installed
from engines.backends import inductor as backend
from engines.build_host import missing_gpu
from engines.declaration import describe_backend
from engines.graph_steps import GraphSteps, Records
from engines.profile import Partition, Profile
from engines.steps import Deferred, Product, Step, Work
from engines.store import AxisRange, FileRecord, ProgramRecord
from engines.weight_table import WeightTable
from export.binding import Binding
from export.graphs.graph import Graph


class InductorSteps(GraphSteps):
    """The ONNX file is emitted and compared as for every backend; the program is compiled from the same graph."""

    def __init__(
        self,
        graph: Graph,
        binding: Binding,
        store: Path,
        profile: Profile,
        reproduce: Callable[[str], str],
        work: Work,
    ) -> None:
        super().__init__(graph, binding, store)
        self._profile = profile
        self._reproduce = reproduce
        self._work = work

    def steps(self, checkpoint: Mapping[str, Any], exporter: Mapping[str, Any], weights: WeightTable) -> list[Step]:
        """Emit, compare, compile."""
        depends_on = {
            "graph": self.declaration,
            "checkpoint": checkpoint,
            "exporter": exporter["source"],
            **compiled_from(self.graph, self.binding, self._profile),
        }
        compiled = Step(self.last, depends_on, self._do_compile, (self._name("emit"),))
        return [self._emit(checkpoint, exporter), self._compare(exporter, weights, "emit"), compiled]

    def bake_steps(self, partition: Partition, weights: WeightTable) -> list[Step]:
        """None: the profile's weights are bound."""
        return []

    @property
    def last(self) -> str:
        return self._name("compile")

    def _plan(self, records: Records) -> None:
        return None

    def _program(self, records: Records) -> ProgramRecord:
        facts = records[self.last].facts
        return ProgramRecord.model_validate({**facts, "reproduce": self._reproduce(self.last)})

    def _engine_file(self, records: Records) -> FileRecord:
        return records[self.last].files[0]

    def _baked_files(self, partition: Partition, records: Records) -> tuple[FileRecord, ...]:
        return ()

    def _census(self, records: Records) -> dict[str, int]:
        return records[self._name("emit")].facts["census"]

    def _do_compile(self, records: Records) -> Product:
        if reason := _put_off(self._profile):
            raise Deferred(reason)
        device = torch.device("cuda", 0) if self._profile.on_gpu else _CPU
        package = self._work.directory(self.last) / "program.pt2"
        started = time.monotonic()
        ranges = compiled_ranges(self.graph, self.binding, self._profile)
        called = backend.compile_graph(self.graph, self.binding, ranges, device, package)
        facts = {
            "target": machine.target(device),
            "ranges": {name: each.model_dump() for name, each in ranges.items()},
            "census": called,
            "seconds": time.monotonic() - started,
        }
        return Product(facts, {self._path("engines", ".pt2"): package})


def compiled_from(graph: Graph, binding: Binding, profile: Profile) -> dict[str, Any]:
    """What a package depends on besides its graph's declaration and the exporter's source, as JSON values."""
    return {
        "version": installed(profile.backend),
        "device": profile.device.capability if profile.device else machine.target(_CPU),
        "ranges": {name: each.model_dump() for name, each in compiled_ranges(graph, binding, profile).items()},
        "source": describe_backend(backends, sys.modules[__name__]),
        "toolchain": backend.toolchain(),
    }


def compiled_ranges(graph: Graph, binding: Binding, profile: Profile) -> dict[str, AxisRange]:
    """The sizes that a profile has a graph compiled for."""
    return backend.ranges(graph, binding, profile.axis_ends)


_CPU = torch.device("cpu")


def _put_off(profile: Profile) -> str | None:
    """Why this machine cannot compile the profile's programs; None if it can."""
    if reason := backend.missing_compiler():
        return reason
    lacking = missing_gpu(profile.device) if profile.device else None
    return None if lacking is None else f"inductor times its kernels on the GPU that they are for, {lacking}"
