"""The graphs that a profile's engines are made of, and the files of quantised weights that they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engines.profile import Arithmetic, Partition, Precision, Profile
from engines.quality import graph_name
from export.checkpoint import Checkpoint
from export.graphs.graph import Graph
from export.graphs.model import Compute, component_graphs
from export.linears import Quantisable
from export.passes.choose_attention import choose_attention
from export.passes.quantise_linears import quantise_linears
from export.passes.shard_rows import shard_rows
from export.passes.shard_text_encoder import shard_text_encoder
from export.passes.share_heads import share_heads
from export.schemes import SchemeName
from export.sidecar import Sidecar, plan_sidecar
from plugins.block_attention import ATTENDING, BlockAttention

COMPUTE: dict[Arithmetic, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "nvfp4": torch.bfloat16,
}
"""The dtype that a component computes in outside its quantised linears."""


def declared_graphs(checkpoint: Checkpoint, profile: Profile, partition: Partition) -> tuple[Graph, ...]:
    """Every graph of one partition over the checkpoint's own tensors, as it is before any linear layer is quantised.

    Those of further tiers are not among them: they read the tensors of another.
    """
    return tuple(graph for graphs in _components(checkpoint, profile, partition).values() for graph in graphs)


def profile_graphs(checkpoint: Checkpoint, profile: Profile, partition: Partition, weights: Path) -> tuple[Graph, ...]:
    """Every graph of one partition, in the profile's precision, in the order in which a request meets them.

    `weights` is the directory that quantised weights are in, or will be: nothing is read from it.

    Raises:
        LinearsError, SidecarError: linear layers cannot be quantised.
    """
    components = _components(checkpoint, profile, partition)
    planned = _plan(components, profile.precision, partition, weights)
    found: list[Graph] = []
    for name, graphs in components.items():
        further = _further(checkpoint, profile, partition) if name == "denoiser" else {}
        quantise = partial(quantise_linears, sidecar=planned[name]) if name in planned else _as_it_is
        found += (shared for graph in map(quantise, graphs) for shared in _shared(graph, profile))
        # Linear layers are listed by the name of the graph that is served, not of its variant.
        found += (replace(quantise(graph), name=variant) for variant, graph in further.items())
    return tuple(found)


def profile_sidecars(
    checkpoint: Checkpoint, profile: Profile, partition: Partition, weights: Path
) -> tuple[Sidecar, ...]:
    """The files of quantised weights that `profile_graphs` reads: one for each component with quantised linears."""
    components = _components(checkpoint, profile, partition)
    return tuple(_plan(components, profile.precision, partition, weights).values())


def _components(checkpoint: Checkpoint, profile: Profile, partition: Partition) -> dict[str, tuple[Graph, ...]]:
    """The graphs of requests that choose no tier."""
    components = _dense(checkpoint, profile, partition)
    choose = partial(_of_a_rank, checkpoint, profile, profile.attention.blocks)
    return components | {"denoiser": tuple(map(choose, components["denoiser"]))}


def _further(checkpoint: Checkpoint, profile: Profile, partition: Partition) -> dict[str, Graph]:
    """What attends in the blocks, for each tier that needs an engine of its own: over the same weights, by its name."""
    return {
        graph_name(graph.name, kind, profile.attention.blocks): _of_a_rank(checkpoint, profile, kind, graph)
        for kind in profile.further_attention
        for graph in _dense(checkpoint, profile, partition)["denoiser"]
        if graph.name in ATTENDING
    }


def _dense(checkpoint: Checkpoint, profile: Profile, partition: Partition) -> dict[str, tuple[Graph, ...]]:
    precision = profile.precision
    compute = Compute(COMPUTE[precision.text_encoder], COMPUTE[precision.denoiser], COMPUTE[precision.video_decoder])
    components = component_graphs(checkpoint, partition, compute, segmented=profile.segmented)
    if not profile.segmented:
        return components
    heads, ranks = checkpoint.dimensions.denoiser.heads, profile.ranks.ulysses
    return components | {"denoiser": tuple(share_heads(graph, heads, ranks) for graph in components["denoiser"])}


def _of_a_rank(checkpoint: Checkpoint, profile: Profile, attention: BlockAttention, graph: Graph) -> Graph:
    """One of the denoiser's graphs with that attention, as each rank runs it.

    Raises:
        ShardError: the ranks do not divide the heads.
    """
    heads, ranks = checkpoint.dimensions.denoiser.heads, profile.ranks.ulysses
    # A segment that attends has a rank's heads already; a whole block comes to them by the exchange inside it.
    attended = heads // ranks if profile.segmented else heads
    return shard_rows(choose_attention(graph, attention, attended), ranks, heads)


def _shared(graph: Graph, profile: Profile) -> tuple[Graph, ...]:
    """One rank's part of a graph whose tensors ranks divide among themselves."""
    ranks = profile.ranks.text_encoder
    if ranks == 1 or not graph.name.startswith("text_encoder."):
        return (graph,)
    return shard_text_encoder(graph, ranks, segmented=profile.backend == "onnxruntime")


def _as_it_is(graph: Graph) -> Graph:
    return graph


def _plan(
    components: Mapping[str, tuple[Graph, ...]], precision: Precision, partition: Partition, weights: Path
) -> dict[str, Sidecar]:
    return {
        component: plan_sidecar(components[component], scheme, weights, f"{component}.{partition}.{scheme}")
        for component, scheme in _schemes(precision).items()
    }


def _schemes(precision: Precision) -> dict[Quantisable, SchemeName]:
    """The components whose linear layers are quantised, and how."""
    schemes: dict[Quantisable, SchemeName] = {}
    if precision.text_encoder == "fp8":
        schemes["text_encoder"] = precision.text_encoder
    if precision.denoiser == "fp8" or precision.denoiser == "nvfp4":
        schemes["denoiser"] = precision.denoiser
    return schemes
