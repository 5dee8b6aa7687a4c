"""Adapters in a build: the graphs that their requests run, over the files of their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.adapters import ADAPTED, AdapterMode, low_rank_name
from engines.graphs import declared_graphs, profile_graphs
from engines.profile import Partition, Profile
from engines.quality import weights_of
from export.artifacts.artifact import Artifact
from export.artifacts.base import Base
from export.artifacts.fits import partition_of
from export.checkpoint import Checkpoint
from export.checkpoint.expressions import Weight
from export.graphs.graph import Graph
from export.low_rank import largest_rank, low_rank_sides, modulation_sides, plan_low_rank
from export.merged import exchanged, merged_weights
from export.passes.add_low_rank import add_low_rank
from export.passes.quantise_linears import quantise_linears
from export.schemes import PLAIN
from export.sidecar import Sidecar, plan_file, plan_sidecar
from plugins.distilled import Family

FAMILIES: tuple[Family, ...] = ("turbo", "flashgen")
"""Artifacts that a request may choose; the others are models of their own."""


class SwitchableError(ValueError):
    """Adapters that a store cannot offer together; says which, and why."""


@dataclass(frozen=True)
class Switchable:
    """One adapter of a store.

    `graphs` are those that it changes over its weights, which `file` has: with low-rank sides, they are engines of
    their own, of which each adapter has the same; merged, they are the partition's. `modulation` are the weights of
    AdaLN that it changes, by the keys of the stored tensors; they are merged in either mode.
    """

    artifact: Artifact
    partition: Partition
    mode: AdapterMode
    graphs: tuple[Graph, ...]
    file: Sidecar
    modulation: Mapping[str, Weight]

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.artifact.distilled.name


def switchables(
    checkpoint: Checkpoint, profile: Profile, artifacts: Sequence[Artifact], weights: Path
) -> tuple[Switchable, ...]:
    """The adapters of a profile's store; `weights` is the directory of their files, of which nothing is read.

    Raises:
        SwitchableError: an artifact that is a model of its own, a name twice, a partition that the profile does not
            have, or weights inside engines.
        LowRankError: an artifact is more than low-rank sides of the blocks' linears.
        SidecarError: weights do not fit how they are held.
    """
    _check(profile, artifacts)
    if not artifacts:
        return ()
    if profile.adapters.mode == "merged":
        return tuple(_merged(checkpoint, profile, artifact, weights) for artifact in artifacts)
    rank = largest_rank(artifacts, Base.of(checkpoint))
    return tuple(_low_rank(checkpoint, profile, artifact, rank, weights) for artifact in artifacts)


def _check(profile: Profile, artifacts: Iterable[Artifact]) -> None:
    known: dict[str, Artifact] = {}
    for artifact in artifacts:
        name, partition = artifact.distilled.name, partition_of(artifact.distilled)
        if artifact.distilled.family not in FAMILIES:
            rule = f"requests choose adapters of {' and '.join(FAMILIES)}; {name} is a model of its own"
            raise SwitchableError(f"{artifact.path}: {rule}, which h3trt adapters fuse makes")
        if name in known:
            raise SwitchableError(f"{artifact.path}: is called {name!r} like {known[name].path}; leave out one of them")
        if partition not in profile.partitions:
            rule = f"is for partition {partition!r}, which profile {profile.name} does not have"
            raise SwitchableError(f"{artifact.path}: {rule}; add it to the profile's partitions")
        if profile.weights == "baked":
            rule = f"profile {profile.name}: weights = 'baked': engines that have their weights inside take no others"
            raise SwitchableError(f"{artifact.path}: {rule}; must be 'bound'")
        known[name] = artifact


def _low_rank(checkpoint: Checkpoint, profile: Profile, artifact: Artifact, rank: int, weights: Path) -> Switchable:
    partition = partition_of(artifact.distilled)
    planned = plan_low_rank(artifact, checkpoint, partition, rank, weights)
    own = (g for g in profile_graphs(checkpoint, profile, partition, weights) if weights_of(g.name) in ADAPTED)
    graphs = tuple(replace(add_low_rank(graph, planned.tensors), name=low_rank_name(graph.name)) for graph in own)
    modulation = merged_weights(checkpoint, partition, modulation_sides(artifact, Base.of(checkpoint)))
    return Switchable(artifact, partition, "low_rank", graphs, planned.file, modulation)


def _merged(checkpoint: Checkpoint, profile: Profile, artifact: Artifact, weights: Path) -> Switchable:
    """Only the linears are merged, which are quantised together or not at all."""
    partition = partition_of(artifact.distilled)
    base = Base.of(checkpoint)
    changed = merged_weights(checkpoint, partition, low_rank_sides(artifact, base))
    modulation = merged_weights(checkpoint, partition, modulation_sides(artifact, base))
    declared = [g for g in declared_graphs(checkpoint, profile, partition) if g.name in ADAPTED]
    graphs = [_over(graph, changed) for graph in declared]
    stem = f"adapter.{partition}.{artifact.distilled.name}"
    scheme = profile.precision.denoiser
    if scheme == "fp8" or scheme == "nvfp4":
        file = plan_sidecar(graphs, scheme, weights, f"{stem}.{scheme}")
        quantised = tuple(quantise_linears(graph, file) for graph in graphs)
        return Switchable(artifact, partition, "merged", quantised, file, modulation)
    file = plan_file({weight: key for key, weight in changed.items()}, PLAIN, weights, stem)
    placed = {key: file.weights[weight]["weight"] for key, weight in changed.items()}
    graphs = [_over(graph, placed) for graph in declared]
    return Switchable(artifact, partition, "merged", tuple(graphs), file, modulation)


def _over(graph: Graph, changed: Mapping[str, Weight]) -> Graph:
    """The graph with others in place of the stored tensors of some keys."""
    return replace(graph, weights=tuple(exchanged(each, changed) for each in graph.weights))
