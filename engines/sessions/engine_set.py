"""The engines of a store, ready to run: `EngineSet.open(store).run(graph, inputs)`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from engines.sessions.dtypes import TORCH
from engines.sessions.onnxruntime import Session
from engines.sessions.weights import MappedWeights
from engines.store import EngineRecord, EngineStore, FileRecord, Manifest, Partition, Region, TensorRecord


class EngineInputError(ValueError):
    """A call that does not fit the engine; says graph, name, what was expected and what was found."""


class _Key(NamedTuple):
    """What a session or a set of weights is for; an engine with bound weights is for all partitions and instances."""

    graph: str
    partition: Partition | None = None
    instance: int | None = None


class EngineSet:
    """The engines of some graphs and partitions of a store. One call runs at a time; others wait.

    A session is opened when its graph first runs, and a weight is mapped when it is first bound.
    """

    def __init__(self, store: EngineStore, graphs: Iterable[str], partitions: Iterable[Partition]) -> None:
        self.root: Path = store.root
        self.manifest: Manifest = store.manifest
        # Read now: the next build may replace the store's files while this set is in use.
        self._baked = self.manifest.profile.weights == "baked"
        self._partitions = tuple(partitions)
        self._engines = {key: store.read(file) for key, file in self._files(graphs)}
        self._threads = self.manifest.profile.thread_count()
        self._mapped = MappedWeights(self.manifest.weight_files)
        self._weights: dict[_Key, dict[str, ort.OrtValue]] = {}
        self._sessions: dict[_Key, Session] = {}
        self._lock = threading.Lock()

    @staticmethod
    def open(
        store: str | Path | EngineStore,
        graphs: Iterable[str] | None = None,
        partitions: Iterable[Partition] | None = None,
    ) -> EngineSet:
        """Verifies a store and reads its engines; all graphs and all built partitions unless some are named.

        Raises:
            StoreError: the store cannot be served from.
            EngineInputError: a graph or partition that is not in it.
        """
        opened = store if isinstance(store, EngineStore) else EngineStore.open(store)
        manifest = opened.manifest
        chosen_graphs, chosen_partitions = list(graphs or manifest.graphs), list(partitions or manifest.bindings)
        _check_present("graph", chosen_graphs, manifest.graphs, opened.root)
        _check_present("partition", chosen_partitions, manifest.bindings, opened.root)
        return EngineSet(opened, chosen_graphs, chosen_partitions)

    def run(
        self,
        graph: str,
        inputs: Mapping[str, torch.Tensor],
        instance: int = 0,
        partition: Partition = "fl2va",
    ) -> dict[str, torch.Tensor]:
        """Runs one instance of a graph on CPU tensors of the shapes and dtypes in the manifest.

        Contiguous inputs are read where they are. The outputs are CPU tensors that own their memory.

        Raises:
            EngineInputError: an unknown graph, partition or instance; a missing or unknown input; a wrong dtype,
                device or shape.
        """
        self._check_target(graph, instance, partition)
        _check_inputs(graph, self.manifest.graphs[graph], inputs)
        contiguous = {name: tensor.detach().contiguous() for name, tensor in inputs.items()}
        with self._lock:
            session = self._session(graph, instance, partition)
            weights = {} if self._baked else self._bound(graph, instance, partition)
            return session.run(contiguous, weights)

    def warm(self) -> None:
        """Opens every session and maps every weight now, which the first run of each would otherwise do."""
        with self._lock:
            for partition in self._partitions:
                for graph in dict.fromkeys(key.graph for key in self._engines):
                    for instance in range(self.manifest.graphs[graph].instances):
                        self._session(graph, instance, partition)
                        if not self._baked:
                            self._bound(graph, instance, partition)

    def _files(self, graphs: Iterable[str]) -> Iterator[tuple[_Key, FileRecord]]:
        for name in graphs:
            engine = self.manifest.graphs[name]
            if self._baked:
                yield from ((_Key(name, p, i), f) for p in self._partitions for i, f in enumerate(engine.baked[p]))
            else:
                yield _Key(name), engine.file

    def _session(self, graph: str, instance: int, partition: Partition) -> Session:
        """One session a graph, shared by all instances; with baked weights one for each of them."""
        key = _Key(graph, partition, instance) if self._baked else _Key(graph)
        if key not in self._sessions:
            files = self._weight_files(graph, instance, partition) if self._baked else {}
            self._sessions[key] = Session(self._engines[key], self._threads, files)
        return self._sessions[key]

    def _weight_files(self, graph: str, instance: int, partition: Partition) -> dict[str, NDArray[np.uint8]]:
        """The files that a baked engine's weights lie in, by the location it names them with."""
        used = {region.file for region in self.manifest.bindings[partition][graph][instance].values()}
        return {Path(self.manifest.weight_files[i].path).name: self._mapped.file(i) for i in sorted(used)}

    def _bound(self, graph: str, instance: int, partition: Partition) -> dict[str, ort.OrtValue]:
        key = _Key(graph, partition, instance)
        if key not in self._weights:
            regions: Mapping[str, Region] = self.manifest.bindings[partition][graph][instance]
            weights = self.manifest.graphs[graph].weights
            self._weights[key] = {w.name: self._mapped.value(regions[w.name], w.dtype) for w in weights}
        return self._weights[key]

    def _check_target(self, graph: str, instance: int, partition: Partition) -> None:
        opened = sorted({key.graph for key in self._engines})
        _require(graph in opened, f"graph {graph!r} is not open; open graphs: {', '.join(opened)}")
        known = ", ".join(self._partitions)
        _require(partition in self._partitions, f"partition {partition!r} is not open; open partitions: {known}")
        count = self.manifest.graphs[graph].instances
        _require(0 <= instance < count, f"graph {graph}: instance {instance}: must be from 0 to {count - 1}")


def _check_present(kind: str, wanted: Iterable[str], present: Iterable[str], store: Path) -> None:
    known = list(present)
    for name in wanted:
        _require(name in known, f"{kind} {name!r} is not in {store}; it has: {', '.join(known)}")


def _check_inputs(graph: str, engine: EngineRecord, inputs: Mapping[str, torch.Tensor]) -> None:
    expected = [spec.name for spec in engine.inputs]
    missing, unknown = [n for n in expected if n not in inputs], [n for n in inputs if n not in expected]
    _require(not missing and not unknown, f"graph {graph}: inputs missing: {missing}, unknown: {unknown}")
    sizes: dict[str, int] = {}
    for spec in engine.inputs:
        _check_tensor(f"graph {graph}: input {spec.name}", spec, inputs[spec.name])
        _check_axes(f"graph {graph}: input {spec.name}", engine, spec, inputs[spec.name], sizes)


def _check_tensor(place: str, spec: TensorRecord, tensor: torch.Tensor) -> None:
    _require(tensor.device.type == "cpu", f"{place}: a CPU tensor expected, found one on {tensor.device}")
    _require(tensor.dtype == TORCH[spec.dtype], f"{place}: {spec.dtype} expected, found {tensor.dtype}")
    shape = tuple(tensor.shape)
    fits = len(shape) == len(spec.shape) and all(
        isinstance(want, str) or want == size for want, size in zip(spec.shape, shape, strict=True)
    )
    _require(fits, f"{place}: shape {list(spec.shape)} expected, found {list(shape)}")


def _check_axes(
    place: str, engine: EngineRecord, spec: TensorRecord, tensor: torch.Tensor, sizes: dict[str, int]
) -> None:
    """Each named axis in its range, and of one size in all inputs; `sizes` collects them."""
    for axis, size in zip(spec.shape, tensor.shape, strict=True):
        if isinstance(axis, str):
            rule = engine.axes[axis]
            legal = rule.minimum <= size <= rule.maximum and size % rule.multiple == 0
            limits = f"from {rule.minimum} to {rule.maximum} in steps of {rule.multiple}"
            _require(legal, f"{place}: {axis} = {size}: must be {limits}")
            other = sizes.setdefault(axis, size)
            _require(other == size, f"{place}: {axis} = {size}: is {other} in an earlier input")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EngineInputError(message)
