"""What adapters that requests choose between take on a device: weights, by a profile's mode, and working memory."""

from __future__ import annotations

from engines.adapters import ADAPTED
from engines.plan.run import Weighing
from engines.profile import Component, component_of
from export.artifacts.turbo import RANK
from plugins.dimensions import DenoiserDimensions


def adapted(weighing: Weighing) -> tuple[str, ...]:
    """The graphs of a profile that adapters change."""
    whole = not weighing.profile.segmented
    return tuple(graph for graph in ADAPTED if graph == "context" or (graph == "block") == whole)


def instances(weighing: Weighing, graph: str) -> tuple[int, ...]:
    """Bytes of one adapter's own weights of each instance: the linears once more, or their sides, of Turbo's rank."""
    if weighing.profile.adapters.mode == "merged":
        return weighing.instances(graph)
    return weighing.weights[graph].side_nbytes(RANK)


def adapter_bytes(weighing: Weighing, component: Component | None = None) -> int:
    """Bytes of one adapter's weights, of a component or of all."""
    graphs = (graph for graph in adapted(weighing) if component in (None, component_of(graph)))
    return sum(sum(instances(weighing, graph)) for graph in graphs)


def block_bytes(weighing: Weighing) -> int:
    """Bytes of one adapter's weights of one block."""
    return sum(instances(weighing, graph)[0] for graph in adapted(weighing) if graph != "context")


def side_arrays(size: DenoiserDimensions, item: float) -> float:
    """A row of what a low-rank side adds to the widest phase: its product, which stands beside the linear's own."""
    return (2 * size.ffn + RANK) * item
