"""An entry of the registry as a TensorRT plugin: IPluginV3 classes made from what the entry already says.

The plugin's attributes are the op's numbers, its format is linear, and its enqueue runs the implementation that torch
would run, on TensorRT's stream and into TensorRT's memory. `tensorrt` and `tensorrt_lean` have the same classes;
whoever registers a creator passes the module.

A plugin that exchanges between ranks is given the group by whoever opens its plan, as an `Exchange`; while a plan is
built there is none, and its plugins send to themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

from plugins.exchanges import GROUP, SEQUENCE
from plugins.op import DOMAIN, Op, Shapes
from plugins.ranks import Group, Loopback, handle_of
from plugins.registry import find

VERSION = "1"

_TORCH: dict[str, torch.dtype] = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
}
"""By TensorRT's name of the type."""

_CARRIER: dict[torch.dtype, str] = {
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<i2",
    torch.int64: "<i8",
}
"""How memory of a type is described to whom knows numpy's types only."""


_FIXED_TYPES = {"threshold": "FLOAT"} | dict.fromkeys(
    ("valid_rows", "tile_rows", "row_tiles", "tile_counts", "skipped", SEQUENCE), "INT64"
)
"""TensorRT's name of the type of those inputs and results that have not the first input's, by their name."""


class PluginError(ValueError):
    """A plugin is given what it does not take; names the op and the argument."""


@dataclass
class Exchange:
    """What the plugins of one opened plan exchange over; whoever runs the plan says, before each run, which group."""

    group: Group | None = None


def creator(trt: ModuleType, op: Op, exchange: Exchange | None = None, building: bool = False) -> object:
    """The IPluginCreatorV3One of an op, to be registered under the namespace `h3`.

    `exchange` is for plugins of plans that are opened to be run, if they exchange between ranks. In a process that is
    `building` plans, those that it opens again send to themselves as well.

    Raises:
        PluginError: the op is no plugin.
    """
    if op.plugin_shapes is None:
        raise PluginError(f"op {op.name}: has no plugin_shapes, so it is no plugin")
    base: Any = trt.IPluginCreatorV3One
    plugin = plugin_class(trt, op, op.plugin_shapes)

    class Creator(base):
        def __init__(self) -> None:
            base.__init__(self)  # pybind11 wants its own __init__ called, not super's
            self.name, self.plugin_namespace, self.plugin_version = op.name, DOMAIN, VERSION
            fields = [trt.PluginField(name, np.array([]), _field_type(trt, op, name)) for name in op.attributes]
            self.field_names = trt.PluginFieldCollection(fields)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            attributes = {field.name: field.data for field in fields}
            if op.exchanges and exchange is None and not building and phase != trt.TensorRTPhase.BUILD:
                raise PluginError(f"plugin {op.name}: exchanges between ranks, and is given none to exchange with")
            return plugin(attributes, exchange)

    return Creator()


@contextmanager
def exchanging(trt: ModuleType, registry: Any, ops: Iterable[Op], exchange: Exchange) -> Iterator[None]:
    """Within it, plans that are opened by the registry's runtime get plugins that exchange over `exchange`.

    Raises:
        PluginError: an op is no plugin, or the registry does not take it.
    """
    creators: list[Any] = [creator(trt, op, exchange) for op in ops]
    registered = []
    try:
        for made in creators:
            if not registry.register_creator(made, made.plugin_namespace):
                raise PluginError(f"op {made.name}: TensorRT's registry does not take it as {DOMAIN}::{made.name}")
            registered.append(made)
        yield
    finally:
        for made in registered:
            registry.deregister_creator(made)


@cache
def register(trt: ModuleType, name: str, building: bool = False) -> object:
    """Has TensorRT's registry find the plugin of an op, unless it does already; returns its creator.

    The registry keeps its address, so the creator stays as long as this process. `building`: as `creator` has it.

    Raises:
        PluginError: the op is no plugin, or the registry does not take it.
        KeyError: there is no such op.
    """
    registry: Any = trt.get_plugin_registry()
    made: Any = creator(trt, find(name), building=building)
    if not registry.register_creator(made, made.plugin_namespace):
        raise PluginError(f"op {name}: TensorRT's registry does not take it as {DOMAIN}::{name}, version {VERSION}")
    return made


def plugin_class(trt: ModuleType, op: Op, shapes: Shapes) -> Any:
    """The IPluginV3 class of an op; it is made from the op's attributes by name.

    Raises:
        PluginError: when made, if an attribute is missing.
    """
    build, runtime = _build(trt, op, shapes), _runtime(trt, op)

    class Plugin(trt.IPluginV3OneCore, build, runtime, trt.IPluginV3):  # type: ignore[misc, name-defined, valid-type]
        def __init__(self, attributes: dict[str, Any], exchange: Exchange | None = None) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            missing = [name for name in op.attributes if name not in attributes]
            if missing:
                raise PluginError(f"plugin {op.name}: attribute {missing[0]} is missing; it takes {op.attributes}")
            self.attributes = {name: _number(op, name, attributes[name]) for name in op.attributes}
            self.plugin_name, self.plugin_namespace, self.plugin_version = op.name, DOMAIN, VERSION
            self.num_outputs = len(op.results)
            if op.exchanges:
                self.exchange = exchange or Exchange(Loopback(int(self.attributes["ranks"])))

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.attributes, self.exchange if op.exchanges else None)

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

    return Plugin


def _build(trt: ModuleType, op: Op, shapes: Shapes) -> Any:
    base: Any = trt.IPluginV3OneBuild

    class Build(base):
        attributes: dict[str, int | float]

        def get_output_data_types(self, types: Sequence[Any]) -> list[Any]:
            named = {f"T_{name}": kind for name, kind in zip(op.tensors, types, strict=True)}
            return [named.get(kind, trt.DataType.INT64) for kind in op.types_of_results]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            return [_expressions(trt, sizes, builder) for sizes in shapes(inputs, self.attributes)]

        def supports_format_combination(self, position: int, described: Sequence[Any], inputs: int) -> bool:
            """The floats are of one type, which is the first input's; the rest is as the op's schema has it."""
            desc, first = described[position].desc, described[0].desc
            wanted = _wanted_type(op, position, first.type.name)
            return desc.format.name == "LINEAR" and desc.type.name == wanted and first.type.name in _TORCH

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            """Nothing depends on the shapes."""

        def get_valid_tactics(self) -> list[int]:
            return []

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            """None of TensorRT's: buffers come from torch's allocator, on the same device."""
            return 0

    return Build


def _runtime(trt: ModuleType, op: Op) -> Any:
    base: Any = trt.IPluginV3OneRuntime

    class Runtime(base):
        attributes: dict[str, int | float]
        exchange: Exchange

        def get_fields_to_serialize(self) -> Any:
            fields = [
                trt.PluginField(name, np.array([value], _storage(op, name)), _field_type(trt, op, name))
                for name, value in self.attributes.items()
            ]
            return trt.PluginFieldCollection(fields)

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            """Nothing depends on the shapes."""

        def set_tactic(self, tactic: int) -> None:
            """There is one."""

        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            described, addresses = (*input_desc, *output_desc), (*inputs, *outputs)
            run(op, self.attributes, described, addresses, stream, self._group() if op.exchanges else None)

        def _group(self) -> Group:
            if self.exchange.group is None:
                raise PluginError(f"plugin {op.name}: is run before the group is known that it exchanges over")
            return self.exchange.group

    return Runtime


def run(
    op: Op,
    attributes: dict[str, int | float],
    described: Sequence[Any],
    addresses: Sequence[int],
    stream: int,
    group: Group | None = None,
) -> None:
    """Runs an op on a CUDA stream, on device memory at addresses; results come last in both sequences.

    Each description has `dims` and a `type` whose `name` is TensorRT's. `group`: of an op that exchanges.
    """
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        memory = [_DeviceMemory(d.dims, d.type.name, a).tensor() for d, a in zip(described, addresses, strict=True)]
        inputs, outputs = memory[: len(op.tensors)], memory[len(op.tensors) :]
        capability = torch.cuda.get_device_capability(inputs[0].device)
        if group is not None:
            inputs.insert(op.inputs.index(GROUP), torch.tensor([handle_of(group)]))
        found = op.implementation("cuda", capability)(*inputs, *attributes.values())
        for output, result in zip(outputs, found if isinstance(found, tuple) else (found,), strict=True):
            output.copy_(result)


class _DeviceMemory:
    """Memory of somebody else's, as the interface that torch reads."""

    def __init__(self, dims: Sequence[int], kind: str, address: int) -> None:
        self._dtype = _TORCH[kind]
        self.__cuda_array_interface__ = {
            "shape": tuple(dims),
            "typestr": _CARRIER[self._dtype],
            "data": (address, False),
            "version": 3,
        }

    def tensor(self) -> torch.Tensor:
        return torch.as_tensor(self, device="cuda").view(self._dtype)


def _wanted_type(op: Op, position: int, first: str) -> str:
    """TensorRT's name of the type at a position of inputs and results."""
    names = (*op.tensors, *op.results)
    return _FIXED_TYPES.get(names[position], first)


def _expressions(trt: ModuleType, sizes: Sequence[Any], builder: Any) -> Any:
    dims = trt.DimsExprs(len(sizes))
    for index, size in enumerate(sizes):
        dims[index] = builder.constant(size) if isinstance(size, int) else size
    return dims


def _number(op: Op, name: str, data: Any) -> int | float:
    values = np.asarray(data).reshape(-1)
    whole = _storage(op, name) is np.int64
    if len(values) != 1 or (whole and values[0] != int(values[0])):
        raise PluginError(
            f"plugin {op.name}: {name} = {values.tolist()}: must be one {'whole ' if whole else ''}number"
        )
    return int(values[0]) if whole else float(values[0])


def _storage(op: Op, name: str) -> type[np.generic]:
    return np.int64 if op.attribute_types[name] is int else np.float32


def _field_type(trt: ModuleType, op: Op, name: str) -> Any:
    kinds = trt.PluginFieldType
    return kinds.INT64 if _storage(op, name) is np.int64 else kinds.FLOAT32
