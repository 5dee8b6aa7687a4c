"""What is in each GPU's memory during each stage, and how long the stage must at least take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from engines.plan.adapters import adapter_bytes, block_bytes
from engines.plan.graphs import Costs
from engines.plan.plan import STAGE_OF, STAGES, GraphPlan, Stage, StagePlan
from engines.profile import COMPONENTS, Component, Device, Profile
from engines.sessions.residency import SLOTS

RESERVED = 640 << 20
"""Device memory that the driver keeps of what it reports as total: 616 MiB on an H200."""

PROCESS = 704 << 20
"""A CUDA context with the libraries' kernels: 693 MiB on an H200 (driver 580, CUDA 13.0)."""

COLLECTIVES, FURTHER_GROUP = 1280 << 20, 480 << 20
"""NCCL's buffers: 1,286 MiB on two H200 after an all-to-all and an all-gather, 2,222 MiB where three stages are shared,
each of which has a group of its own.
"""

FRAME_BYTES = 4 * (2 * 17 + 2 * 5 + 17) + 3
"""A pixel and channel being stitched: body and tail as float32, blended and converted, and a byte of each frame."""

RGB = 3


@dataclass(frozen=True)
class Holding:
    """What of a component's weights is on one GPU: always, and in its own stage; and what comes from the host."""

    always: int = 0
    staged: int = 0
    transferred: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class Placement:
    """A profile's memory for one request. `graphs` are the costs' plans."""

    costs: Costs
    graphs: tuple[GraphPlan, ...]

    def stages(self) -> tuple[StagePlan, ...]:
        """All stages, in the order of a request."""
        return tuple(self._stage(name) for name in STAGES)

    @cached_property
    def holdings(self) -> dict[Component, Holding]:
        """Every component on a rank that has a share of it."""
        if not self.profile.on_gpu:
            return {component: Holding() for component in COMPONENTS}
        return {component: self._holding(component) for component in COMPONENTS}

    @property
    def profile(self) -> Profile:
        """Whose memory it is."""
        return self.costs.weighing.profile

    def _holding(self, component: Component) -> Holding:
        own, adapters = self._own(component), self._of_adapters(component)
        both = zip(vars(own).values(), vars(adapters).values(), strict=True)
        return Holding(*(one + other for one, other in both))

    def _of_adapters(self, component: Component) -> Holding:
        """What adapters add: all of them are kept like the component's own weights, and a request uses one.

        Merged weights are used in place of the component's.
        """
        assert self.profile.residency is not None  # as profiles for GPUs are validated
        weighing, count = self.costs.weighing, self.costs.workload.adapters
        place, one = self.profile.residency.of(component), count and adapter_bytes(weighing, component)
        if not one or place == "resident":
            return Holding(always=count * one)
        beside = self.profile.adapters.mode == "low_rank"
        if not isinstance(place, int):
            return Holding(staged=one * beside, transferred=one * beside, pinned=count * one)
        block, passes = block_bytes(weighing), self.costs.workload.forwards
        streamed = block * max(0, self.costs.weighing.outline.dimensions.denoiser.layers - place)
        slots = min(SLOTS * block, streamed)
        return Holding(count * (one - streamed), slots, beside * passes * streamed, count * streamed)

    def _own(self, component: Component) -> Holding:
        assert self.profile.residency is not None  # as profiles for GPUs are validated
        place = self.profile.residency.of(component)
        graphs = list(self._of(component))
        used = sum(graph.weights for graph in graphs if graph.runs)
        if isinstance(place, int):
            return self._partly(place, graphs)
        everything = self._of_all_partitions(component, graphs)
        if place == "resident":
            return Holding(always=everything)
        staged = used if place == "swapped" else min(used, SLOTS * max(graph.instance for graph in graphs))
        return Holding(staged=staged, transferred=used, pinned=everything)

    def _of_all_partitions(self, component: Component, graphs: list[GraphPlan]) -> int:
        """Each partition has a transformer of its own, its refiner included; the other components serve them all."""
        own = [graph for graph in graphs if component in ("modulation", "denoiser") or graph.graph == "context"]
        further = len(self.profile.partitions) - 1
        return sum(graph.weights for graph in graphs) + further * sum(graph.weights for graph in own)

    def _partly(self, resident: int, graphs: list[GraphPlan]) -> Holding:
        """Some blocks stay, those of the others pass through the slots in every forward."""
        total = sum(graph.weights for graph in graphs)
        block = sum(graph.instance for graph in graphs if graph.graph.startswith("block"))
        layers = self.costs.weighing.outline.dimensions.denoiser.layers
        streamed = block * max(0, layers - resident)
        slots = min(SLOTS * block, streamed)
        passes, copies = self.costs.workload.forwards, len(self.profile.partitions)
        return Holding(copies * (total - streamed), slots, streamed * passes, copies * streamed)

    def _of(self, component: Component) -> Iterator[GraphPlan]:
        return (graph for graph in self.graphs if graph.component == component)

    def _stage(self, name: Stage) -> StagePlan:
        component = next(c for c in COMPONENTS if STAGE_OF[c] == name)
        graphs, holding = list(self._of(component)), self.holdings[component]
        parts = _Parts(
            weights=sum(one.always for one in self.holdings.values()),
            slots=holding.staged,
            activations=max(graph.activations for graph in graphs),
            workspace=max(graph.workspace for graph in graphs),
            buffers=sum(graph.io for graph in graphs) + self._lasting(name),
            collectives=sum(graph.collectives for graph in graphs),
            process=self._process,
        )
        peaks = tuple(self._peak(rank, name, parts) for rank in range(max(1, self.profile.gpus)))
        flops = sum(count for graph in graphs for count in graph.flops.values())
        times = self._times(graphs, holding)
        return StagePlan(
            name=name,
            **vars(parts),
            peaks=peaks,
            flops=flops * self._sharers(component),
            traffic=sum(graph.traffic for graph in graphs),
            transferred=holding.transferred,
            compute=times["compute"],
            memory=times["memory"],
            peer=times["peer"],
            host=times["host"],
        )

    def _peak(self, rank: int, name: Stage, parts: _Parts) -> int:
        """What the parts add up to on one rank: without what it has no share of."""
        component = next(c for c in COMPONENTS if STAGE_OF[c] == name)
        weights = sum(one.always for c, one in self.holdings.items() if rank < self._sharers(c))
        if rank >= self._sharers(component):
            return weights + parts.process
        stitching = self._lasting(name) if rank and name == "decode_video" else 0
        return weights + parts.total - parts.weights - stitching

    def _sharers(self, component: Component) -> int:
        """Ranks that have a share of a component's work."""
        ranks = self.profile.ranks
        # References are encoded where they were decoded from their files, and the soundtrack where it is written.
        shared = dict.fromkeys(("video_encoder", "audio_encoder", "audio_decoder"), 1)
        shared |= {"text_encoder": ranks.text_encoder, "video_decoder": ranks.video_tiles}
        return shared.get(component, ranks.ulysses)

    @property
    def _process(self) -> int:
        if not self.profile.on_gpu:
            return 0
        groups = sum(count > 1 for _, count in self.profile.ranks)
        return RESERVED + PROCESS + (COLLECTIVES + FURTHER_GROUP * (groups - 1) if groups else 0)

    def _lasting(self, name: Stage) -> int:
        """Buffers that are no graph's: text rows between encoder and denoiser, and the frames being stitched."""
        size, rows, shape = self.costs.weighing.outline.dimensions.denoiser, self.costs.rows, self.costs.shape
        if name == "decode_video":
            return RGB * FRAME_BYTES * shape.width * shape.height
        return rows.text * size.hidden * 4

    def _times(self, graphs: list[GraphPlan], holding: Holding) -> dict[str, float]:
        device = self.profile.device
        if device is None:
            return dict.fromkeys(("compute", "memory", "peer", "host"), 0.0)
        exchanged = sum(graph.exchanged for graph in graphs)
        return {
            "compute": sum(n / (device.tflops(a) * 1e12) for graph in graphs for a, n in graph.flops.items()),
            "memory": sum(graph.traffic for graph in graphs) / (device.memory_gbps * 1e9),
            "peer": exchanged / (_peer_gbps(device) * 1e9),
            "host": holding.transferred / (device.host_gbps * 1e9),
        }


def _peer_gbps(device: Device) -> float:
    """Without a link of their own GPUs exchange over the host's: written there, then read."""
    return device.peer_gbps or device.host_gbps / 2


@dataclass(frozen=True)
class _Parts:
    weights: int
    slots: int
    activations: int
    workspace: int
    buffers: int
    collectives: int
    process: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())
