"""The engines of a store, ready to run: `EngineSet.open(store).run(graph, inputs)`."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch

from engines.sessions.backend import Backend, EngineInputError, open_backend
from engines.sessions.dtypes import TORCH
from engines.store import EngineRecord, EngineStore, Manifest, Partition, TensorRecord
from plugins.exchanges import GROUP


class EngineSet:
    """The engines of some graphs and partitions of a store. One call runs at a time; others wait."""

    def __init__(
        self,
        store: EngineStore,
        graphs: Iterable[str],
        partitions: Iterable[Partition],
        backend: Backend | None = None,
    ) -> None:
        """Opens the backend of the store's profile, unless one is given."""
        self.root: Path = store.root
        self.manifest: Manifest = store.manifest
        self._graphs, self._partitions = tuple(graphs), tuple(partitions)
        self._backend = backend or open_backend(store, self._graphs, self._partitions)
        self._lock = threading.Lock()

    @property
    def device(self) -> torch.device:
        """Where outputs are, and where inputs are read without being copied."""
        return self._backend.device

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions that are open."""
        return self._partitions

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the open graphs are bound to."""
        return self.manifest.bound_bytes(self._graphs)

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
        chosen_graphs = list(manifest.graphs if graphs is None else graphs)
        chosen_partitions = list(partitions or manifest.partitions)
        _check_present("graph", chosen_graphs, manifest.graphs, opened.root)
        _check_present("partition", chosen_partitions, manifest.partitions, opened.root)
        return EngineSet(opened, chosen_graphs, chosen_partitions)

    def run(
        self,
        graph: str,
        inputs: Mapping[str, torch.Tensor],
        instance: int = 0,
        partition: Partition | None = None,
        outputs: Mapping[str, torch.Tensor] = MappingProxyType({}),
        adapter: str | None = None,
    ) -> dict[str, torch.Tensor]:
        """Runs one instance of a graph on tensors of the shapes and dtypes in the manifest.

        Contiguous inputs on `device` are read where they are; others are copied to it. The outputs are on `device`;
        those that `outputs` has a tensor for are written there, the others own their memory.
        partition: whose weights, of a graph that has its own in each; others have the same in all that are open.
        adapter: one of the partition's that changes what the graphs compute that it has weights for, and no others.

        Raises:
            EngineInputError: an unknown graph, partition, adapter or instance; a missing or unknown input; an unknown
                output; a wrong dtype, device, layout or shape.
        """
        partition = partition or self._partitions[0]
        self._check_adapter(adapter, partition)
        changed = adapter if adapter is not None and self.manifest.changes(adapter, graph) else None
        graph = self.manifest.engine_of(graph, changed)
        self._check_target(graph, instance, partition)
        self._check_tensors(graph, inputs, outputs)
        placed = {name: self._placed(name, tensor) for name, tensor in inputs.items()}
        with self._lock:
            return self._backend.run(graph, placed, instance, partition, outputs, changed)

    def _placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """An input where it is read; a group's handle is read on the host."""
        return tensor.detach().to("cpu" if name == GROUP else self.device).contiguous()

    def warm(self) -> None:
        """Does now what the first run of each engine would otherwise wait for."""
        with self._lock:
            self._backend.warm()

    @contextmanager
    def stage(self, graphs: Collection[str]) -> Iterator[None]:
        """Within it, these graphs run again and again; at its end, what they hold for that alone is freed."""
        try:
            yield
        finally:
            with self._lock:
                self._backend.leave(graphs)

    def empty(self, spec: TensorRecord) -> torch.Tensor:
        """An uninitialised tensor of that dtype and shape on `device`; the shape must have no named axis left."""
        sizes = [size for size in spec.shape if not isinstance(size, str)]
        _require(len(sizes) == len(spec.shape), f"tensor {spec.name}: shape {list(spec.shape)} has no fixed size")
        return torch.empty(sizes, dtype=TORCH[spec.dtype], device=self.device)

    def _check_adapter(self, adapter: str | None, partition: Partition) -> None:
        offered = [name for name, record in self.manifest.adapters.items() if record.partition == partition]
        known = ", ".join(offered) or "none"
        _require(adapter is None or adapter in offered, f"adapter {adapter!r}: must be one of {partition}'s: {known}")

    def _check_target(self, graph: str, instance: int, partition: Partition) -> None:
        opened = sorted(self._graphs)
        _require(graph in opened, f"graph {graph!r} is not open; open graphs: {', '.join(opened)}")
        known = ", ".join(self._partitions)
        _require(partition in self._partitions, f"partition {partition!r} is not open; open partitions: {known}")
        count = self.manifest.graphs[graph].instances
        _require(0 <= instance < count, f"graph {graph}: instance {instance}: must be from 0 to {count - 1}")

    def _check_tensors(
        self, graph: str, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        engine = self.manifest.graphs[graph]
        sizes: dict[str, int] = {}
        _check_names(f"graph {graph}: inputs", engine.inputs, inputs)
        for spec in engine.inputs:
            place, tensor = f"graph {graph}: input {spec.name}", inputs[spec.name]
            _check_tensor(place, spec, tensor, {"cpu", self.device.type})
            _check_axes(place, engine, spec, tensor, sizes)
        given = [spec for spec in engine.outputs if spec.name in outputs]
        _check_names(f"graph {graph}: outputs", given, outputs)
        for spec in given:
            place, tensor = f"graph {graph}: output {spec.name}", outputs[spec.name]
            _check_tensor(place, spec, tensor, {self.device.type})
            _check_axes(place, engine, spec, tensor, sizes)
            _require(tensor.is_contiguous(), f"{place}: a contiguous tensor expected")


def _check_present(kind: str, wanted: Iterable[str], present: Iterable[str], store: Path) -> None:
    known = list(present)
    for name in wanted:
        _require(name in known, f"{kind} {name!r} is not in {store}; it has: {', '.join(known)}")


def _check_names(place: str, specs: Iterable[TensorRecord], tensors: Mapping[str, torch.Tensor]) -> None:
    expected = [spec.name for spec in specs]
    missing, unknown = [n for n in expected if n not in tensors], [n for n in tensors if n not in expected]
    _require(not missing and not unknown, f"{place} missing: {missing}, unknown: {unknown}")


def _check_tensor(place: str, spec: TensorRecord, tensor: torch.Tensor, devices: set[str]) -> None:
    kinds = " or ".join(sorted(kind.upper() for kind in devices))
    _require(tensor.device.type in devices, f"{place}: a {kinds} tensor expected, found one on {tensor.device}")
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
