"""The step that folds a pinned schedule: its AdaLN tables, made once by the engines that would make them for requests.

The engines and the way they are run are those of a free schedule, so that a store with tables gives the same bits.
Their weights, some 40% of a transformer, are read here and by no server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from engines.adapters import weights_key
from engines.build_host import missing_to_run
from engines.declaration import source_hash, structure
from engines.graph_steps import GraphSteps, Records
from engines.profile import ONE_RANK, Partition, Profile
from engines.sessions import modulation as running
from engines.sessions.dtypes import NAMES
from engines.sessions.engine_set import EngineSet
from engines.sessions.modulation import ADALN, TIME, embeddings, projections
from engines.steps import Deferred, Product, Step, Work
from engines.store import EngineStore, Extent, Manifest, Region, TableRecord, WeightFile, weight_file
from export import merged
from export.artifacts import patched
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.materialise import materialise
from export.checkpoint.safetensors_file import read_header, write_tensors
from plugins import schedule as schedules
from plugins.dimensions import DenoiserDimensions
from plugins.distilled import PinnedSchedule
from plugins.schedule import Schedule

TABLES = "tables"
"""Directory of a store that its tables are in."""

MAKERS = (running, schedules, merged, patched)
"""The modules that say, beside this one, what a table is."""

Instance = Mapping[str, Weight]
"""The weights of one instance of a graph, by the names of its engine's weight inputs."""


@dataclass(frozen=True)
class TableWeights:
    """What a table is made from: the weights of both graphs, which an adapter may have changed.

    A weight that is not stored as it is is computed when its instance's turn comes, and lies in a file meanwhile.
    """

    time: Instance
    adaln: tuple[Instance, ...]

    @staticmethod
    def of(graphs: Mapping[str, GraphSteps]) -> TableWeights:
        """Those that the graphs are bound to."""
        return TableWeights(graphs[TIME].binding.instances[0], tuple(graphs[ADALN].binding.instances))

    def changed(self, weights: Mapping[str, Weight]) -> TableWeights:
        """The same with others in place of the stored tensors of some keys."""
        time, *adaln = (merged.exchanged(instance, weights) for instance in (self.time, *self.adaln))
        return TableWeights(time, tuple(adaln))

    def structures(self, files: Sequence[Path]) -> list[dict[str, Any]]:
        """How each weight is made of tensors of those files, as JSON values."""

        def place(stored: Stored) -> str:
            return f"{files.index(stored.file)}:{stored.key}"

        return [{n: structure(w, place) for n, w in sorted(each.items())} for each in (self.time, *self.adaln)]

    def leaves(self) -> Iterator[Stored]:
        """Every stored tensor that they are made of."""
        for instance in (self.time, *self.adaln):
            for weight in instance.values():
                yield from weight.leaves()


class Assemble(Protocol):
    """Makes the manifest that a part of a store's engines runs under, from the records of finished steps."""

    def __call__(
        self,
        records: Records,
        partition: Partition,
        instances: Mapping[str, int],
        files: Sequence[WeightFile],
        bindings: Mapping[str, Sequence[Mapping[str, Region]]],
    ) -> Manifest:
        """`instances`: how many each graph has, by name; `bindings` by graph, of one `partition`."""


@dataclass(frozen=True)
class TableStep:
    """The step for one pinned schedule: of a student, or of the adapter of that name, which may have changed `weights`.

    `graphs`: those of `running.MODULATION`, by name.
    """

    schedule: PinnedSchedule
    adapter: str | None
    partition: Partition
    graphs: Mapping[str, GraphSteps]
    weights: TableWeights
    size: DenoiserDimensions
    profile: Profile
    store: Path
    work: Work
    assemble: Assemble

    @property
    def key(self) -> str:
        """What the manifest calls its tables."""
        return weights_key(self.partition, self.adapter)

    @property
    def name(self) -> str:
        """The step's."""
        return f"table.{self.key}"

    def step(self, requires: Sequence[str]) -> Step:
        """Done again when the schedule, the weights or the engine changes; `requires`: what `assemble` reads of."""
        files = sorted({leaf.file for leaf in self.weights.leaves()})
        depends_on = {
            "schedule": self.schedule.model_dump(mode="json"),
            "weights": self.weights.structures(files),
            "files": [[weight_file(file).model_dump(), file.stat().st_mtime_ns] for file in files],
            "source": source_hash([Path(__file__), *(Path(str(module.__file__)) for module in MAKERS)]),
        }
        return Step(self.name, depends_on, self._do, tuple(requires))

    def record(self, records: Records) -> TableRecord:
        """The manifest's entry, from the finished step's record."""
        done = records[self.name]
        return TableRecord.model_validate({**done.facts, "file": done.files[0].model_dump()})

    def _do(self, records: Records) -> Product:
        if reason := missing_to_run(self.profile):
            raise Deferred(reason)
        digest = _Digest()
        slots = Schedule.pinned(self.schedule).slots()
        directory = self.work.directory(self.name)
        tables = _stacked(self._layers(slots, digest, records, directory), self.size)
        file = directory / "table.safetensors"
        write_tensors(file, tables, {})
        facts: dict[str, Any] = {
            "dtype": NAMES[tables["head"].dtype],
            **{name: Extent(tensor.offset, tensor.shape) for name, tensor in read_header(file).tensors.items()},
            "weights_sha256": digest.hexdigest(),
            "weights_bytes": digest.nbytes,
            "timesteps": slots.tolist(),
            "engine": records[self.graphs[ADALN].last].key,
        }
        return Product(facts, {f"{TABLES}/{self.key}.{{sha}}.safetensors": file})

    def _layers(
        self, slots: torch.Tensor, digest: _Digest, records: Records, directory: Path
    ) -> Iterator[list[torch.Tensor]]:
        """Each layer's part of the table of each step, the head's last."""
        total = len(self.weights.adaln)
        with self._opened(TIME, [self.weights.time], digest, records, directory) as engines:
            embedded = [each.cpu() for each in embeddings(_runner(engines), slots)]
        for start, instances in _together(self.weights.adaln):
            with self._opened(ADALN, instances, digest, records, directory) as engines:
                for instance in range(len(instances)):
                    self.work.report(self.name, f"layer {start + instance + 1}", start + instance, total)
                    yield projections(_runner(engines), embedded, instance)

    @contextmanager
    def _opened(
        self, graph: str, instances: Sequence[Instance], digest: _Digest, records: Records, directory: Path
    ) -> Iterator[EngineSet]:
        """The engine of a graph over some instances' weights, which count into the digest."""
        file = directory / "weights.safetensors"
        stored = [_stored(instance, file) for instance in instances]
        for each in stored:
            digest.add(each)
        paths = sorted({tensor.file for each in stored for tensor in each.values()})
        regions = [
            {n: Region(paths.index(s.file), s.offset, tuple(s.shape)) for n, s in each.items()} for each in stored
        ]
        files = [weight_file(path) for path in paths]
        manifest = self.assemble(records, self.partition, {graph: len(stored)}, files, {graph: regions})
        store = EngineStore(self.store, manifest.model_copy(update={"profile": _alone(manifest.profile)}))
        yield EngineSet(store, [graph], [self.partition])
        file.unlink(missing_ok=True)


def _runner(engines: EngineSet) -> running.Run:
    return lambda graph, inputs, instance: engines.run(graph, inputs, instance)


def _alone(profile: Profile) -> Profile:
    """The profile for a process that runs nothing but this, on one GPU, whose weights come one after the other."""
    residency = profile.residency and profile.residency.model_copy(update={"modulation": "streamed"})
    alone = {"gpus": min(1, profile.gpus), "ranks": ONE_RANK, "residency": residency, "weights": "bound"}
    return profile.model_copy(update=alone)


def _together(instances: Sequence[Instance]) -> Iterator[tuple[int, Sequence[Instance]]]:
    """Instances whose engine is opened once, after the number of those before: all that are stored, or each one."""
    if all(isinstance(weight, Stored) for instance in instances for weight in instance.values()):
        yield 0, instances
        return
    for index, instance in enumerate(instances):
        yield index, [instance]


def _stored(instance: Instance, file: Path) -> dict[str, Stored]:
    """The instance's weights where they lie; those that have to be computed are written to a file of their own."""
    computed = {name: weight for name, weight in instance.items() if not isinstance(weight, Stored)}
    found = {name: weight for name, weight in instance.items() if isinstance(weight, Stored)}
    if computed:
        write_tensors(file, {name: materialise(weight) for name, weight in computed.items()}, {})
        found |= read_header(file).tensors
    return found


@dataclass
class _Digest:
    """SHA-256 over weights, in the order in which they are used, and how many bytes they are."""

    nbytes: int = 0
    _hash: Any = field(default_factory=hashlib.sha256)

    def add(self, instance: Mapping[str, Stored]) -> None:
        for name in sorted(instance):
            data = materialise(instance[name]).reshape(-1).view(torch.uint8).numpy()
            self._hash.update(data)
            self.nbytes += data.nbytes

    def hexdigest(self) -> str:
        return str(self._hash.hexdigest())


def _stacked(layers: Iterator[list[torch.Tensor]], size: DenoiserDimensions) -> dict[str, torch.Tensor]:
    """The tensors of a `TableRecord`'s file, from each layer's part of the table of each step."""
    *blocks, head = (torch.stack(layer) for layer in layers)
    shape = (len(head), size.layers, -1, 6 * size.hidden)
    return {"blocks": torch.stack(blocks, dim=1).reshape(shape), "head": head}
