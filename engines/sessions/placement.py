"""Which weights a profile keeps on the GPU, and in which units they come and go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engines.profile import Component, Residency, component_of
from engines.sessions.residency import spread

PINNED_FIRST: tuple[Component, ...] = (
    "denoiser",
    "modulation",
    "text_encoder",
    "video_decoder",
    "audio_decoder",
    "video_encoder",
    "audio_encoder",
)
"""Components in the order in which pinned host memory is given to them: what is copied most often comes first."""


@dataclass(frozen=True)
class Placement:
    """Where the units of a group are: `resident` ones on the GPU, until the stage ends if `swapped`."""

    resident: frozenset[int]
    swapped: bool

    def returning(self, units: int) -> list[int]:
        """The units that are copied to the GPU more than once."""
        return [unit for unit in range(units) if self.swapped or unit not in self.resident]


def groups(graphs: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Graphs whose weights come and go together, by name: the segments of a block; every other graph by itself."""
    found: dict[str, tuple[str, ...]] = {}
    for graph in graphs:
        name = "block" if graph.startswith("block.") else graph
        found[name] = (*found.get(name, ()), graph)
    return found


def place(residency: Residency, group: str, units: int) -> Placement:
    """Where a profile wants a group's units."""
    wanted = residency.of(component_of(group))
    if isinstance(wanted, int):
        # The number counts blocks; what else the denoiser has is small, and used at every step.
        return Placement(spread(wanted, units) if group == "block" else frozenset(range(units)), swapped=False)
    if wanted == "streamed":
        return Placement(frozenset(), swapped=False)
    return Placement(frozenset(range(units)), swapped=wanted == "swapped")
