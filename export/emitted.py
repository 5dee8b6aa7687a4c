"""What emission gives: a graph's ONNX model without data, and what to bind to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from export.binding import Binding
from export.checkpoint.expressions import Stored
from export.graphs.graph import Graph


@dataclass(frozen=True)
class Emitted:
    """A graph's checked model: opset 23, weights as inputs, `h3` functions attached, no data and no float64 inside.

    `census` counts the operators of the main graph as "domain::Op" ("ai.onnx" is the standard domain).
    """

    graph: Graph
    model: onnx.ModelProto
    binding: Binding
    census: Mapping[str, int]

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The weight inputs, in the model's order; they follow the graph's own inputs."""
        return tuple(w.name for w in self.binding.inputs)

    @property
    def bindings(self) -> tuple[Mapping[str, Stored], ...]:
        """For each instance, the stored tensor of every weight input by name."""
        return self.binding.instances
