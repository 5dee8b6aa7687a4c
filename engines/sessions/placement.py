"""Which weights a profile keeps on the GPU, and in which units they come and go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from engines.profile import Place, Residency
from engines.sessions.residency import spread

Component = Literal["text_encoder", "modulation", "denoiser", "video_decoder", "audio_decoder"]
"""A key of a profile's `residency`."""

_COMPONENTS: Mapping[str, Component] = {
    "text_encoder": "text_encoder",
    "modulation": "modulation",
    "video_decoder_tile": "video_decoder",
    "audio_decoder": "audio_decoder",
}
"""By the first part of a graph's name; all others are the denoiser's."""

PINNED_FIRST: tuple[Component, ...] = ("denoiser", "modulation", "text_encoder", "video_decoder", "audio_decoder")
"""Components in the order in which pinned host memory is given to them: what is copied most often comes first."""


@dataclass(frozen=True)
class Placement:
    """Where the units of a group are: `resident` ones on the GPU, until the stage ends if `swapped`."""

    resident: frozenset[int]
    swapped: bool

    def returning(self, units: int) -> list[int]:
        """The units that are copied to the GPU more than once."""
        return [unit for unit in range(units) if self.swapped or unit not in self.resident]


def component(graph: str) -> Component:
    """The component that a graph's weights belong to."""
    return _COMPONENTS.get(graph.partition(".")[0], "denoiser")


def groups(graphs: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Graphs whose weights come and go together, by name: the segments of a block; every other graph by itself."""
    found: dict[str, tuple[str, ...]] = {}
    for graph in graphs:
        name = "block" if graph.startswith("block.") else graph
        found[name] = (*found.get(name, ()), graph)
    return found


def place(residency: Residency, group: str, units: int) -> Placement:
    """Where a profile wants a group's units."""
    wanted: Place | int = getattr(residency, component(group))
    if isinstance(wanted, int):
        # The number counts blocks; what else the denoiser has is small, and used at every step.
        return Placement(spread(wanted, units) if group == "block" else frozenset(range(units)), swapped=False)
    if wanted == "streamed":
        return Placement(frozenset(), swapped=False)
    return Placement(frozenset(range(units)), swapped=wanted == "swapped")
