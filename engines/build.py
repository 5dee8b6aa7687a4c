"""Builds an engine store from a checkpoint: `build(checkpoint, profile, store)`, incremental and resumable."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from engines.adapters import weights_key
from engines.backend import installed
from engines.declaration import describe_checkpoint, describe_exporter, describe_graph
from engines.graph_steps import GraphSteps
from engines.graphs import declared_graphs, profile_graphs, profile_sidecars
from engines.inductor_steps import InductorSteps
from engines.onnxruntime_steps import OnnxRuntimeSteps
from engines.plan import Workload, make_plan
from engines.plan.rules import check_ranks
from engines.profile import Partition, Profile
from engines.quality import weights_of
from engines.quantise_step import QuantiseStep
from engines.sessions.modulation import MODULATION
from engines.steps import Ledger, Product, Record, Step, StepEvent, StepReport, Work
from engines.store import (
    LOCK,
    MANIFEST,
    SCHEMA_VERSION,
    WEIGHTS,
    AdapterRecord,
    Begun,
    CheckpointRecord,
    EngineStore,
    Manifest,
    Region,
    WeightFile,
    rebuild_command,
)
from engines.switchable import Switchable, switchables
from engines.table_step import TABLES, TableStep, TableWeights
from engines.tensorrt_steps import TensorRTSteps
from engines.weight_table import WeightTable
from export.artifacts.artifact import Artifact
from export.binding import Binding, bind
from export.checkpoint import Checkpoint
from export.checkpoint.expressions import Stored
from export.checkpoint.outline import Outline
from export.graphs.graph import Graph
from export.graphs.model import check_consumption
from plugins.distilled import PinnedSchedule

PRODUCTS = ("engines", "portable", "tokenizer", TABLES, "weights")
"""Directories of a store that hold nothing but what steps have made."""


class BuildError(ValueError):
    """A build that cannot be done; says what does not fit, and what would."""


@dataclass(frozen=True)
class BuildReport:
    """A build that has come to an end. Its store opens, unless steps had to be put off."""

    store: Path
    steps: tuple[StepReport, ...]

    @property
    def deferred(self) -> tuple[StepReport, ...]:
        """The steps that this machine cannot do, and those that wait for them."""
        return tuple(step for step in self.steps if step.status == "deferred")

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
    resume: bool = False,
    adapters: Sequence[Artifact] = (),
) -> BuildReport:
    """Brings a store up to date with a checkpoint and a profile, and opens it to see that it is whole.

    `adapters` are what requests may choose beside the checkpoint itself.

    What has not changed is left alone. `only` names one step, which is done again, after those before it where needed;
    the later ones are left for the next build. What this machine cannot do is put off. `resume` goes on with a store
    that was begun on another machine: what does not depend on the machine is taken from it as it is.

    Raises:
        CheckpointError, ProfileError, PlanError, BuildError, SwitchableError, LowRankError: the build cannot start.
        StepFailed: a step failed. What was built stays; a manifest that was there before is still valid.
    """
    root, loaded = Path(store).absolute(), Profile.load(profile)
    opened = Checkpoint.open(Path(checkpoint).absolute())
    files = {str(adapter.path.absolute()): adapter.distilled.sha256 for adapter in adapters}
    begun = Begun(
        checkpoint=str(opened.root),
        fingerprint=opened.fingerprint,
        sample=opened.sample,
        profile=loaded,
        adapters=files,
    )
    if resume:
        _check_same(root, Begun.read(root), begun)
    reproduce = partial(_step_command, rebuild_command(root, loaded.name, opened.root, files))
    ledger = Ledger(root, reproduce, progress, resume)
    offered = switchables(opened, loaded, adapters, root / WEIGHTS)
    steps = _Plan(opened, loaded, offered, root, reproduce, ledger.work).steps()
    _check_known(only, steps)
    with _locked(root, progress):
        begun.write(root)
        report = BuildReport(root, tuple(ledger.run(steps, only)))
        if only is None and not report.deferred:
            ledger.prune(steps, PRODUCTS)
            EngineStore.open(root, to_run=False)
    return report


class _Plan:
    """The steps of one build. A graph is built once, for the first partition; the others only bind their weights.

    The engines that make a student's tables are built like the others, and left out of the manifest.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        profile: Profile,
        offered: Sequence[Switchable],
        root: Path,
        reproduce: Callable[[str], str],
        work: Work,
    ) -> None:
        self._checkpoint, self._written, self._root, self._work = checkpoint, profile, root, work
        profile = profile.serving(checkpoint.student)
        _check_partitions(checkpoint, self._written, profile)
        self._profile = profile
        self._first = profile.partitions[0]
        check_ranks(profile, checkpoint.dimensions)
        workload = Workload(adapters=len(offered))
        plan = make_plan(profile, Outline.read(checkpoint.root), workload) if profile.on_gpu else None

        def steps(graph: Graph) -> GraphSteps:
            if profile.backend == "inductor":
                return InductorSteps(graph, bind(graph), root, profile, reproduce, work)
            if plan is None:
                return OnnxRuntimeSteps(graph, bind(graph), root)
            return TensorRTSteps(graph, bind(graph), root, profile, plan, reproduce, work)

        weights = root / WEIGHTS
        everything = {
            p: [steps(graph) for graph in profile_graphs(checkpoint, profile, p, weights)] for p in profile.partitions
        }
        self._modulation = {
            p: {g.graph.name: g for g in graphs if g.graph.name in MODULATION} for p, graphs in everything.items()
        }
        spared = self._modulation[self._first] if checkpoint.student else {}
        self._graphs = {p: [g for g in graphs if g.graph.name not in spared] for p, graphs in everything.items()}
        self._spared = tuple(spared.values())
        self._offered = {one.name: _Offered(one, [bind(graph) for graph in one.graphs]) for one in offered}
        # All adapters with low-rank sides have the same engines, over files of their own.
        self._with_sides = [steps(graph) for one in offered[:1] if one.mode == "low_rank" for graph in one.graphs]
        sidecars = [s for p in profile.partitions for s in profile_sidecars(checkpoint, profile, p, weights)]
        sidecars += [one.file for one in offered]
        self._quantised = [QuantiseStep(sidecar, root, work) for sidecar in sidecars]
        own = [g.binding for graphs in self._graphs.values() for g in graphs]
        self._weights = WeightTable(
            [*own, *(binding for one in self._offered.values() for binding in one.bindings)],
            {each.sidecar.path: each.written for each in self._quantised},
        )

    def steps(self) -> list[Step]:
        """Every step, after those that it requires."""
        checkpoint, exporter = describe_checkpoint(self._checkpoint, self._first), describe_exporter()
        steps = [
            *self._hashes(),
            self._tokenizer(),
            *(self._bind(partition, exporter) for partition in self._profile.partitions),
            *(self._bind_adapter(one, exporter) for one in self._offered.values()),
            *(quantised.step() for quantised in self._quantised),
        ]
        for graph in self._engines:
            steps += graph.steps(checkpoint, exporter, self._weights)
        spared = WeightTable((graph.binding for graph in self._spared), {})
        for graph in self._spared:
            steps += graph.steps(checkpoint, exporter, spared)
        made = [step.name for step in steps if step.name.startswith("modulation.")]
        steps += [table.step(["tokenizer", *made]) for table in self._tables]
        if self._profile.weights == "baked":
            steps += [s for p, graphs in self._graphs.items() for g in graphs for s in g.bake_steps(p, self._weights)]
        return [*steps, self._manifest(tuple(step.name for step in steps))]

    @cached_property
    def _tables(self) -> tuple[TableStep, ...]:
        """The tables of a student's schedule, and of those of adapters that change the modulation's weights."""
        student, found = self._checkpoint.student, []
        if student is not None:
            found += [self._table(student.schedule, p, None, TableWeights.of(g)) for p, g in self._modulation.items()]
        for name, one in self._offered.items():
            if changed := one.switchable.modulation:
                own = TableWeights.of(self._modulation[one.switchable.partition]).changed(changed)
                schedule = one.switchable.artifact.distilled.schedule
                found.append(self._table(schedule, one.switchable.partition, name, own))
        return tuple(found)

    def _table(
        self, schedule: PinnedSchedule, partition: Partition, adapter: str | None, weights: TableWeights
    ) -> TableStep:
        return TableStep(
            schedule,
            adapter,
            partition,
            self._modulation[self._first],
            weights,
            self._checkpoint.dimensions.denoiser,
            self._profile,
            self._root,
            self._work,
            self._assemble,
        )

    def _assemble(
        self,
        records: Mapping[str, Record],
        partition: Partition,
        instances: Mapping[str, int],
        files: Sequence[WeightFile],
        bindings: Mapping[str, Sequence[Mapping[str, Region]]],
    ) -> Manifest:
        """What the engines that make tables run under."""
        engines = {name: self._modulation[self._first][name].engine_record(records) for name in instances}
        return Manifest(
            schema_version=SCHEMA_VERSION,
            profile=self._profile,
            versions=installed(self._profile.backend),
            checkpoint=self._checkpoint_record,
            dimensions=self._checkpoint.dimensions,
            tokenizer=records["tokenizer"].files[0],
            graphs={name: engine.model_copy(update={"instances": instances[name]}) for name, engine in engines.items()},
            weight_files=tuple(files),
            bindings={partition: {name: tuple(map(dict, bound)) for name, bound in bindings.items()}},
        )

    def _bind(self, partition: Partition, exporter: Mapping[str, Any]) -> Step:
        graphs = self._graphs[partition]
        instances = [instance for graph in graphs for instance in graph.binding.instances]
        depends_on = {
            "exporter": exporter,
            "graphs": [graph.declaration for graph in graphs],
            "shared": [graph.declaration for graph in self._graphs[self._first]],
            "files": self._weights.identities(instances),
            "places": self._weights.places,
        }
        return Step(f"{partition}.bind", depends_on, partial(self._do_bind, partition))

    def _do_bind(self, partition: Partition, records: Mapping[str, Record]) -> Product:
        check_consumption(self._checkpoint, declared_graphs(self._checkpoint, self._profile, partition), partition)
        for graph, shared in zip(self._graphs[partition], self._graphs[self._first], strict=True):
            if graph.declaration != shared.declaration:
                name = graph.graph.name
                raise BuildError(f"graph {name} of {partition} differs from that of {self._first}: no shared engine")
        regions = self._weights.regions
        return Product({g.graph.name: [regions(i) for i in g.binding.instances] for g in self._graphs[partition]})

    @property
    def _engines(self) -> list[GraphSteps]:
        """The graphs that engines are made of, each once."""
        return [*self._graphs[self._first], *self._with_sides]

    def _bind_adapter(self, one: _Offered, exporter: Mapping[str, Any]) -> Step:
        instances = [instance for binding in one.bindings for instance in binding.instances]
        depends_on = {
            "exporter": exporter,
            "graphs": one.declarations(),
            "shared": [graph.declaration for graph in self._engines],
            "files": self._weights.identities(instances),
            "places": self._weights.places,
        }
        return Step(one.step, depends_on, lambda records: self._do_bind_adapter(one))

    def _do_bind_adapter(self, one: _Offered) -> Product:
        shared = {graph.graph.name: graph.declaration for graph in self._engines}
        for graph, declaration in zip(one.switchable.graphs, one.declarations(), strict=True):
            if declaration != shared[graph.name]:
                raise BuildError(f"{one.switchable.artifact.path}: graph {graph.name} differs: no shared engine")
        return Product({name: [self._weights.regions(i) for i in own] for name, own in one.own().items()})

    def _hashes(self) -> Iterator[Step]:
        """Compares the files with the checkpoint's own list of hashes, where it has one, as often as they change."""
        listed = self._checkpoint.listed_files()
        if listed:
            stats = {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in listed if file.exists()}
            yield Step("hashes", {"files": stats}, self._do_hashes)

    def _do_hashes(self, records: Mapping[str, Record]) -> Product:
        return Product({"verified": len(self._checkpoint.verify_hashes())})

    def _tokenizer(self) -> Step:
        data = self._checkpoint.tokenizer_file.read_bytes()
        depends_on = {"sha256": hashlib.sha256(data).hexdigest()}
        return Step("tokenizer", depends_on, lambda records: Product({}, {"tokenizer/tokenizer.{sha}.json": data}))

    def _manifest(self, requires: tuple[str, ...]) -> Step:
        about = self._about()
        depends_on = {"schema": SCHEMA_VERSION, **about, "installed": installed(self._profile.backend)}
        return Step("manifest", depends_on, partial(self._do_manifest, about), requires)

    def _do_manifest(self, about: Mapping[str, Any], records: Mapping[str, Record]) -> Product:
        manifest = Manifest.model_validate_json(
            json.dumps(
                {
                    "schema_version": SCHEMA_VERSION,
                    **about,
                    "versions": self._versions(records),
                    "tokenizer": records["tokenizer"].files[0].model_dump(),
                    "graphs": {graph.graph.name: graph.engine_record(records).model_dump() for graph in self._engines},
                    "bindings": {partition: records[f"{partition}.bind"].facts for partition in self._graphs}
                    | {one.bound_as: records[one.step].facts for one in self._offered.values()},
                    "tables": {table.key: table.record(records).model_dump() for table in self._tables},
                }
            )
        )
        return Product({}, {MANIFEST: manifest.model_dump_json(indent=1).encode()})

    def _versions(self, records: Mapping[str, Record]) -> dict[str, str]:
        """Of the libraries that the graphs were exported with, maybe on another machine, and of this one's backend."""
        first = self._graphs[self._first][0].graph.name
        exported: dict[str, str] = records[f"{first}.emit"].facts["versions"]
        return exported | installed(self._profile.backend)

    @property
    def _checkpoint_record(self) -> CheckpointRecord:
        checkpoint = self._checkpoint
        return CheckpointRecord(root=str(checkpoint.root), layout=checkpoint.layout, fingerprint=checkpoint.fingerprint)

    def _about(self) -> dict[str, Any]:
        """The part of the manifest that no step has to find out."""
        checkpoint = self._checkpoint
        return {
            "profile": self._written.model_dump(mode="json"),
            "checkpoint": self._checkpoint_record.model_dump(),
            "student": checkpoint.student and checkpoint.student.model_dump(mode="json"),
            "adapters": {name: one.record.model_dump(mode="json") for name, one in self._offered.items()},
            "dimensions": checkpoint.dimensions.model_dump(mode="json"),
            "weight_files": self._weights.files_json,
        }


@dataclass(frozen=True)
class _Offered:
    """An adapter, and what its graphs are bound to."""

    switchable: Switchable
    bindings: Sequence[Binding]

    @property
    def bound_as(self) -> str:
        """What its weights are bound as."""
        return weights_key(self.switchable.partition, self.switchable.name)

    @property
    def step(self) -> str:
        """The name of the step that says where its weights lie."""
        return f"{self.bound_as}.bind"

    @property
    def record(self) -> AdapterRecord:
        """What the manifest says of it."""
        one = self.switchable
        return AdapterRecord(
            distilled=one.artifact.distilled,
            partition=one.partition,
            mode=one.mode,
            path=str(one.artifact.path.absolute()),
            modulates=bool(one.modulation),
        )

    def declarations(self) -> list[dict[str, Any]]:
        """What its graphs are, apart from their weights."""
        return [describe_graph(g, b) for g, b in zip(self.switchable.graphs, self.bindings, strict=True)]

    def own(self) -> dict[str, list[dict[str, Stored]]]:
        """Its own weights of each instance, by the graph that they are found by."""
        found: dict[str, list[dict[str, Stored]]] = {}
        for graph, binding in zip(self.switchable.graphs, self.bindings, strict=True):
            every = self.switchable.mode == "merged"
            found[weights_of(graph.name)] = [
                {name: s for name, s in instance.items() if every or s.file == self.switchable.file.path}
                for instance in binding.instances
            ]
        return found


def _check_partitions(checkpoint: Checkpoint, written: Profile, profile: Profile) -> None:
    """`written` is the profile before it was made to fit the checkpoint."""
    if not profile.partitions:
        raise BuildError(
            f"profile {written.name}: partitions = {list(written.partitions)}: checkpoint {checkpoint.root} has no "
            f"task of these; must be of {list(checkpoint.partitions)}"
        )
    missing = [p for p in profile.partitions if p not in checkpoint.partitions]
    if missing:
        raise BuildError(
            f"profile {profile.name}: partitions = {list(profile.partitions)}: checkpoint {checkpoint.root} has no "
            f"{missing[0]!r}; must be of {list(checkpoint.partitions)}"
        )


def _step_command(command: str, step: str) -> str:
    return f"{command} --step {shlex.quote(step)}"


def _check_same(store: Path, begun: Begun, now: Begun) -> None:
    """Refuses to resume a build of another checkpoint, profile or adapter. All may lie elsewhere by now."""
    fresh = "leave out --resume to build it anew"
    if begun.fingerprint != now.fingerprint:
        raise BuildError(
            f"{store}: was begun with the checkpoint of fingerprint {begun.fingerprint} ({begun.checkpoint}), but "
            f"{now.checkpoint} has {now.fingerprint}; {fresh}"
        )
    if begun.sample != now.sample:
        raise BuildError(
            f"{store}: was begun with other weights ({begun.checkpoint}) than {now.checkpoint} has; {fresh}"
        )
    if list(begun.adapters.values()) != list(now.adapters.values()):
        listed = [", ".join(map(_told, each.adapters.items())) or "none" for each in (begun, now)]
        raise BuildError(f"{store}: was begun with other adapters ({listed[0]}) than {listed[1]}; {fresh}")
    before, after = ({k: v for k, v in each.profile if k != "name"} for each in (begun, now))
    changed = ", ".join(key for key in before if before[key] != after[key])
    if changed:
        raise BuildError(
            f"{store}: was begun with profile {begun.profile.name}; profile {now.profile.name} now differs from that "
            f"in {changed}; {fresh}"
        )


def _told(adapter: tuple[str, str | None]) -> str:
    path, sha256 = adapter
    return f"{path} of SHA-256 {sha256}"


def _check_known(only: str | None, steps: list[Step]) -> None:
    names = [step.name for step in steps]
    if only is not None and only not in names:
        raise BuildError(f"step {only!r}: must be one of {', '.join(names)}")


@contextmanager
def _locked(store: Path, progress: Callable[[StepEvent], None]) -> Iterator[None]:
    """Holds the store's lock; says so when another build has to be waited for."""
    store.mkdir(parents=True, exist_ok=True)
    lock = FileLock(store / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(StepEvent(0, 0, f"waiting for another build of {store}", "started"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
