"""Traces a graph's module under fake tensors: weights become inputs, in the checkpoint's dtypes, and hold no data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from export.binding import Binding, BindingError, WeightInput
from export.checkpoint.expressions import Stored
from export.graphs.graph import Axis, Graph, TensorSpec


class BoundModule(torch.nn.Module):
    """The graph's module as a function of its inputs and of the stored tensors of one instance.

    Each parameter is the instance's weight expression over those tensors, cast to the dtype the module declares for it.
    """

    def __init__(self, graph: Graph, binding: Binding, instance: int = 0) -> None:
        super().__init__()
        module = build_module(graph)
        self._weights = graph.weights[instance]
        self._keys = [binding.instances[instance][w.name].key for w in binding.inputs]
        self._dtypes = {name: tensor.dtype for name, tensor in _state(module)}
        # In a tuple, so that the exporter does not find parameters without data and list them as its own.
        self._module = (module,)

    def forward(self, inputs: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...]) -> object:
        """The module's outputs; `weights` are the stored tensors in the binding's order."""
        stored = dict(zip(self._keys, weights, strict=True))

        def leaf(tensor: Stored) -> torch.Tensor:
            return stored[tensor.key]

        values = {name: _cast(self._weights[name].evaluate(leaf), dtype) for name, dtype in self._dtypes.items()}
        return torch.func.functional_call(self._module[0], values, inputs)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Without a node in the trace where nothing is to be done, as for most of thousands of weights."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def build_module(graph: Graph) -> torch.nn.Module:
    """The graph's module in evaluation mode, without data.

    Raises:
        BindingError: its parameters and buffers are not exactly those the graph's weights name, in the same shapes.
    """
    with torch.device("meta"):
        module = graph.module().eval().requires_grad_(False)
    state = dict(_state(module))
    weights = graph.weights[0]
    if state.keys() != weights.keys():
        raise BindingError(
            f"graph {graph.name}: module parameters without a weight: {sorted(state.keys() - weights.keys())}; "
            f"weights without a parameter: {sorted(weights.keys() - state.keys())}"
        )
    for name, tensor in state.items():
        if tuple(tensor.shape) != weights[name].shape:
            raise BindingError(
                f"graph {graph.name}: parameter {name}: expected {list(tensor.shape)}, "
                f"found {list(weights[name].shape)} in {next(weights[name].leaves()).key}"
            )
    return module


class Range(Protocol):
    """Sizes of an axis: the largest, and the one that a compiler should have in mind."""

    @property
    def optimum(self) -> int:
        """The size of the traced example."""

    @property
    def maximum(self) -> int:
        """The largest legal size."""


class BakedModule(torch.nn.Module):
    """The graph's module as a function of its inputs alone: one instance's stored tensors, in the binding's order, are
    constants."""

    def __init__(self, graph: Graph, binding: Binding, stored: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._bound = (BoundModule(graph, binding),)
        self._names = [f"weight_{index}" for index, _ in enumerate(binding.inputs)]
        for name, tensor in zip(self._names, stored, strict=True):
            self.register_buffer(name, tensor)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> object:
        """The module's outputs."""
        return self._bound[0](inputs, tuple(self.get_buffer(name) for name in self._names))


def trace(
    graph: Graph,
    binding: Binding,
    within: Mapping[str, Range] = MappingProxyType({}),
    stored: Sequence[torch.Tensor] | None = None,
) -> torch.export.ExportedProgram:
    """The exported program over (inputs, weights), with the graph's axes as dynamic dimensions.

    `within` narrows axes to ranges; the others have all their sizes. With `stored` tensors of an instance on the CPU
    the program is over (inputs), and they are its constants.
    """
    sizes = trace_sizes(graph, binding) | {name: each.optimum for name, each in within.items()}
    dimensions = _Dimensions({name: each.maximum for name, each in within.items()})
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with fake:
        arguments = tuple(
            tuple(torch.empty(resolve(s.shape, sizes), dtype=s.dtype) for s in group)
            for group in (graph.inputs, binding.inputs)
        )
    dynamic = tuple(tuple(dimensions.of(s.shape) for s in group) for group in (graph.inputs, binding.inputs))
    module: torch.nn.Module = BoundModule(graph, binding)
    if stored is not None:
        module, arguments, dynamic = BakedModule(graph, binding, stored), arguments[:1], dynamic[:1]
    with torch.no_grad():
        return torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False)


def axes(specs: Iterable[TensorSpec | WeightInput]) -> dict[str, Axis]:
    """The named axes of those tensors, by name."""
    return {d.name: d for s in specs for d in s.shape if isinstance(d, Axis)}


def trace_sizes(graph: Graph, binding: Binding) -> dict[str, int]:
    """A size for every axis: that of the largest trial, or of the first instance's weights."""
    sizes = instance_sizes(binding, 0)
    for name, axis in axes(graph.inputs).items():
        tried = [trial[name] for trial in graph.trials]
        sizes.setdefault(name, max(tried, default=min(axis.maximum, 2 * axis.multiple * max(axis.minimum, 2))))
    return sizes


def instance_sizes(binding: Binding, instance: int) -> dict[str, int]:
    """Sizes of the axes that one instance's weights fix."""
    sizes: dict[str, int] = {}
    for weight in binding.inputs:
        stored = binding.instances[instance][weight.name]
        sizes |= {d.name: n for d, n in zip(weight.shape, stored.shape, strict=True) if isinstance(d, Axis)}
    return sizes


def resolve(shape: tuple[int | Axis, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape with every axis replaced by its size."""
    return tuple(sizes[d.name] if isinstance(d, Axis) else d for d in shape)


class _Dimensions:
    """torch.export dimensions of axes; one for each axis name. `largest` are the sizes that some are narrowed to."""

    def __init__(self, largest: Mapping[str, int]) -> None:
        self._largest = largest
        self._known: dict[str, object] = {}

    def of(self, shape: tuple[int | Axis, ...]) -> dict[int, object]:
        return {i: self._one(d) for i, d in enumerate(shape) if isinstance(d, Axis)}

    def _one(self, axis: Axis) -> object:
        if not axis.provable:
            return torch.export.Dim.DYNAMIC
        if axis.name not in self._known:
            step = axis.multiple
            name = axis.name if step == 1 else f"_{axis.name}"
            largest = self._largest.get(axis.name, axis.maximum)
            dim = torch.export.Dim(name, min=-(-axis.minimum // step), max=largest // step)
            self._known[axis.name] = dim if step == 1 else step * dim
        return self._known[axis.name]


def _state(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters and all buffers, kept in the checkpoint or not: a buffer without a weight would have no data."""
    yield from module.named_parameters()
    yield from module.named_buffers()
