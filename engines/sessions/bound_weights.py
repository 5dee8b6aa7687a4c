"""The weights of a store's graphs on one GPU: placed as the profile wants them, found by graph and instance."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engines import machine
from engines.profile import component_of
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

    def __init__(self, groups: Mapping[tuple[str, Partition], Group], manifest: Manifest) -> None:
        self._groups, self._bindings = groups, manifest.bindings

    @contextmanager
    def bound(self, graph: str, instance: int, partition: Partition) -> Iterator[dict[str, BoundWeight]]:
        """Each of an instance's weights by name, for a run that is queued within."""
        group = self._groups.get((graph, partition))
        if group is None:
            yield {}
            return
        memory = group.device.acquire(instance)
        offsets = group.units.offsets[instance]
        regions = self._bindings[partition][graph][instance]
        yield {n: BoundWeight(r, memory, offsets[WeightName(graph, n)]) for n, r in regions.items()}
        group.device.release(instance)

    def load_lasting(self) -> None:
        """Has what stays on the GPU from one stage to the next copied there."""
        for group in self._groups.values():
            group.load_lasting()

    def leave(self, graphs: Collection[str]) -> None:
        """Frees the swapped weights and the slots of those graphs."""
        for group in {id(g): g for (name, _), g in self._groups.items() if name in graphs}.values():
            group.leave()


def bound_groups(opening: Opening, gpu: Gpu) -> dict[tuple[str, Partition], Group]:
    """The group of each graph that has weights; pinned host memory goes to the groups that need it most."""
    manifest = opening.store.manifest
    residency = manifest.profile.residency
    assert residency is not None  # a profile on GPUs has one
    mapped = MappedWeights(manifest.weight_files)
    weighty = [graph for graph in opening.graphs if manifest.graphs[graph].weights]
    sets = _weight_sets(opening, weighty)
    packs = {one: PackedUnits(mapped, _units(opening, one.graphs, one.partitions[0])) for one in sets}
    staging = Staging(gpu, max((size for packed in packs.values() for size in packed.sizes), default=0))
    budget = manifest.profile.memory_budget(machine.memory_bytes()) // PINNED_SHARE
    found: dict[tuple[str, Partition], Group] = {}
    for one in sorted(sets, key=lambda each: PINNED_FIRST.index(component_of(each.name))):
        name, packed = one.name, packs[one]
        placement = place(residency, name, len(packed.sizes))
        kept = kept_within(budget, packed.sizes, placement.returning(len(packed.sizes)))
        budget -= sum(packed.sizes[unit] for unit in kept)
        host = HostWeights(gpu, packed, staging, kept)
        group = Group(packed, DeviceWeights(gpu, host, placement.resident), placement)
        found |= {(graph, partition): group for graph in one.graphs for partition in one.partitions}
    return found


@dataclass(frozen=True)
class _WeightSet:
    """Graphs whose weights come and go together, and the partitions that have the same ones."""

    name: str
    graphs: tuple[str, ...]
    partitions: tuple[Partition, ...]


def _weight_sets(opening: Opening, weighty: Sequence[str]) -> list[_WeightSet]:
    """Each partition has a transformer of its own; what else it has, encoders and decoders, is there once for all."""
    bindings, sets = opening.store.manifest.bindings, []
    for name, graphs in groups(weighty).items():
        alike: list[list[Partition]] = []
        for partition in opening.partitions:
            same = [other for other in alike if all(bindings[other[0]][g] == bindings[partition][g] for g in graphs)]
            if same:
                same[0].append(partition)
            else:
                alike.append([partition])
        sets += [_WeightSet(name, graphs, tuple(partitions)) for partitions in alike]
    return sets


def _units(opening: Opening, graphs: Sequence[str], partition: Partition) -> list[dict[WeightName, tuple[Any, int]]]:
    """The weights of each instance of some graphs that have equally many."""
    manifest = opening.store.manifest
    dtypes = {WeightName(g, w.name): w.dtype for g in graphs for w in manifest.graphs[g].weights}
    units: list[dict[WeightName, tuple[Any, int]]] = [{} for _ in manifest.bindings[partition][graphs[0]]]
    for graph in graphs:
        for unit, regions in zip(units, manifest.bindings[partition][graph], strict=True):
            for name, region in regions.items():
                weight = WeightName(graph, name)
                unit[weight] = region, region.nbytes(dtypes[weight])
    return units
