"""The weights of a store's graphs on one GPU: placed as the profile wants them, found by graph and instance."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engines import machine
from engines.adapters import has_sides, weights_key, without_sides
from engines.profile import component_of
from engines.quality import weights_of
from engines.sessions.backend import Opening
from engines.sessions.gpu import Gpu
from engines.sessions.placement import PINNED_FIRST, Placement, groups, place
from engines.sessions.residency import DeviceWeights, HostWeights, Staging, kept_within
from engines.sessions.weights import MappedWeights, PackedUnits, WeightName
from engines.store import Manifest, Partition, Region

PINNED_SHARE = 2
"""Pinned copies of weights never have more than this part of the host memory that the profile allows."""


@dataclass(frozen=True)
class BoundWeight:
    """A weight on the GPU: its region, and its unit's memory, in which it begins at `offset`."""

    region: Region
    memory: torch.Tensor
    offset: int

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.memory.data_ptr() + self.offset


@dataclass(frozen=True)
class Group:
    """Graphs whose weights come and go together."""

    units: PackedUnits
    device: DeviceWeights
    placement: Placement

    def load_lasting(self) -> None:
        """Has its weights copied to the GPU, unless they are swapped."""
        if not self.placement.swapped:
            self.device.load_resident()

    def leave(self) -> None:
        """Frees its slots, and its weights if they are swapped."""
        self.device.free(resident=self.placement.swapped)


class BoundWeights:
    """All groups of a store; empty where weights are inside the engines."""

    def __init__(self, groups: Mapping[tuple[str, str], Group], manifest: Manifest) -> None:
        """groups: by graph, and what its weights are bound as."""
        self._groups, self._manifest = groups, manifest

    @contextmanager
    def bound(
        self, graph: str, instance: int, partition: Partition, adapter: str | None = None
    ) -> Iterator[dict[str, BoundWeight]]:
        """Each of an instance's weights by name, for a run that is queued within."""
        found: dict[str, BoundWeight] = {}
        with ExitStack() as held:
            for owner, bound_as in self._sources(graph, partition, adapter):
                if group := self._groups.get((owner, bound_as)):
                    found |= self._acquired(group, owner, bound_as, instance)
                    held.callback(group.device.release, instance)
            yield found

    def _sources(self, graph: str, partition: Partition, adapter: str | None) -> Iterator[tuple[str, str]]:
        """The groups that have the graph's weights: merged into an adapter's, the partition's own are not read."""
        changed = adapter is not None and self._manifest.changes(adapter, graph)
        if not changed or has_sides(graph):
            yield without_sides(graph), partition
        if changed:
            yield weights_of(graph), weights_key(partition, adapter)

    def _acquired(self, group: Group, graph: str, bound_as: str, instance: int) -> dict[str, BoundWeight]:
        memory, offsets = group.device.acquire(instance), group.units.offsets[instance]
        regions = self._manifest.bindings[bound_as][graph][instance]
        return {n: BoundWeight(r, memory, offsets[WeightName(graph, n)]) for n, r in regions.items()}

    def load_lasting(self) -> None:
        """Has what stays on the GPU from one stage to the next copied there."""
        for group in self._groups.values():
            group.load_lasting()

    def leave(self, graphs: Collection[str]) -> None:
        """Frees the swapped weights and the slots of those graphs."""
        for group in {id(g): g for (name, _), g in self._groups.items() if name in graphs}.values():
            group.leave()


def bound_groups(opening: Opening, gpu: Gpu) -> dict[tuple[str, str], Group]:
    """The group of each graph that has weights, and of what these are bound as; an adapter's are kept where its
    component's are.

    Pinned host memory goes to the groups that need it most.
    """
    manifest = opening.store.manifest
    residency = manifest.profile.residency
    assert residency is not None  # a profile on GPUs has one
    mapped = MappedWeights(manifest.weight_files)
    sets = [*_weight_sets(opening), *_adapter_sets(opening)]
    packs = {one: PackedUnits(mapped, _units(manifest, one)) for one in sets}
    staging = Staging(gpu, max((size for packed in packs.values() for size in packed.sizes), default=0))
    budget = manifest.profile.memory_budget(machine.memory_bytes()) // PINNED_SHARE
    found: dict[tuple[str, str], Group] = {}
    for one in sorted(sets, key=lambda each: PINNED_FIRST.index(component_of(each.name))):
        name, packed = one.name, packs[one]
        placement = place(residency, name, len(packed.sizes))
        kept = kept_within(budget, packed.sizes, placement.returning(len(packed.sizes)))
        budget -= sum(packed.sizes[unit] for unit in kept)
        host = HostWeights(gpu, packed, staging, kept)
        group = Group(packed, DeviceWeights(gpu, host, placement.resident), placement)
        found |= {(graph, bound_as): group for graph in one.graphs for bound_as in one.bound_as}
    return found


@dataclass(frozen=True)
class _WeightSet:
    """Graphs whose weights come and go together, and what the same weights are bound as: partitions, or an adapter's.

    `engines` are the graphs that run with them, which say their dtypes.
    """

    name: str
    graphs: tuple[str, ...]
    bound_as: tuple[str, ...]
    engines: tuple[str, ...]


def _weight_sets(opening: Opening) -> list[_WeightSet]:
    """Each partition has a transformer of its own; what else it has, encoders and decoders, is there once for all."""
    manifest = opening.store.manifest
    weighty = [graph for graph in opening.graphs if manifest.graphs[graph].weights and not has_sides(graph)]
    bindings, sets = manifest.bindings, []
    for name, graphs in groups(weighty).items():
        alike: list[list[Partition]] = []
        for partition in opening.partitions:
            same = [other for other in alike if all(bindings[other[0]][g] == bindings[partition][g] for g in graphs)]
            if same:
                same[0].append(partition)
            else:
                alike.append([partition])
        sets += [_WeightSet(name, graphs, tuple(partitions), graphs) for partitions in alike]
    return sets


def _adapter_sets(opening: Opening) -> Iterator[_WeightSet]:
    """The own weights of the adapters of the partitions that are open."""
    manifest = opening.store.manifest
    for adapter, record in manifest.adapters.items():
        if record.partition in opening.partitions:
            bound_as = weights_key(record.partition, adapter)
            changed = [graph for graph in manifest.bindings[bound_as] if graph in opening.graphs]
            for name, graphs in groups(changed).items():
                engines = tuple(manifest.engine_of(graph, adapter) for graph in graphs)
                yield _WeightSet(name, graphs, (bound_as,), engines)


def _units(manifest: Manifest, one: _WeightSet) -> list[dict[WeightName, tuple[Any, int]]]:
    """The weights of each instance of some graphs that have equally many."""
    bindings = manifest.bindings[one.bound_as[0]]
    units: list[dict[WeightName, tuple[Any, int]]] = [{} for _ in bindings[one.graphs[0]]]
    for graph, engine in zip(one.graphs, one.engines, strict=True):
        dtypes = {w.name: w.dtype for w in manifest.graphs[engine].weights}
        for unit, regions in zip(units, bindings[graph], strict=True):
            unit |= {WeightName(graph, name): (region, region.nbytes(dtypes[name])) for name, region in regions.items()}
    return units
