"""What a graph is: its module, its typed inputs and outputs with named dimensions, and the weights it consumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from export.checkpoint.expressions import Weight


@dataclass(frozen=True)
class Axis:
    """A named dynamic dimension. `multiple` is a divisor that every legal size has.

    `provable`: the tracer can show that the traced graph holds for all legal sizes. Where it cannot, as with strided
    convolutions down to a single element, the graph's trials must show it: they include the smallest size.

    `follows` names an axis that this one grows with: where the other's sizes are cut into ranges, these are as well.
    """

    name: str
    minimum: int
    maximum: int
    multiple: int = 1
    provable: bool = True
    follows: str = ""


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output: fixed sizes are ints, dynamic ones are axes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | Axis, ...]
    below: int | tuple[Axis, ...] = 0
    """Integers only: the exclusive upper bound of the values, or the axes whose sizes add up to it."""
    trial: Callable[[Mapping[str, int]], torch.Tensor] | None = None
    """Makes a trial's tensor from the sizes of its axes, where no random one would do."""


@dataclass(frozen=True)
class Graph:
    """One graph of the model, ready to be traced.

    `module` builds the torch module (called under fake tensors, so it may be of released size); its `forward` takes
    the inputs in order and returns the outputs in order. `weights[i]` maps each parameter (or persistent buffer) of
    the module, by its dotted name, to the expression that instance i of the graph is bound to: 50 entries for the
    block graph, 1 for most. All instances must agree on shapes, dtypes and expression structure; only the stored
    tensors differ.
    """

    name: str
    module: Callable[[], torch.nn.Module]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[Mapping[str, Weight], ...]
    compute: torch.dtype = torch.float32
    """Dtype of the wide part (matmuls); islands that the model keeps in float32 stay float32."""
    tolerance: float = 1e-5
    """Largest |ONNX Runtime - torch eager| relative to the output's largest magnitude, in float32."""
    trials: tuple[Mapping[str, int], ...] = field(default=())
    """Sizes of the named axes at which the emitted graph is compared with eager; at least two where any axis moves."""
    variant: str = ""
    """What its tensors do not tell of the computation: graphs that differ in nothing else differ in this."""
    weight_axes: Mapping[str, tuple[int | Axis, ...]] = field(default_factory=dict)
    """Shapes, by parameter name, of the weights whose sizes differ between instances; these must be stored as they are.
    Such an axis takes its size from the instance, not from `trials`."""
