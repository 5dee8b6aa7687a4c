"""An entry of the registry as a TensorRT plugin: IPluginV3 classes made from what the entry already says.

The plugin's attributes are the op's numbers, its format is linear, and its enqueue runs the implementation that torch
would run, on TensorRT's stream and into TensorRT's memory. `tensorrt` and `tensorrt_lean` have the same classes;
whoever registers a creator passes the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

from plugins.op import DOMAIN, Op, Shapes
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
    ("valid_rows", "tile_rows", "row_tiles", "tile_counts", "skipped"), "INT64"
)
"""TensorRT's name of the type of those inputs and results that have not the first input's, by their name."""


class PluginError(ValueError):
    """A plugin is given what it does not take; names the op and the argument."""


def creator(trt: ModuleType, op: Op) -> object:
    """The IPluginCreatorV3One of an op, to be registered under the namespace `h3`.

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
            return plugin({field.name: field.data for field in fields})

    return Creator()


@cache
def register(trt: ModuleType, name: str) -> object:
    """Has TensorRT's registry find the plugin of an op, unless it does already; returns its creator.

    The registry keeps its address, so the creator stays as long as this process.

    Raises:
        PluginError: the op is no plugin, or the registry does not take it.
        KeyError: there is no such op.
    """
    registry: Any = trt.get_plugin_registry()
    made: Any = creator(trt, find(name))
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
        def __init__(self, attributes: dict[str, Any]) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            missing = [name for name in op.attributes if name not in attributes]
            if missing:
                raise PluginError(f"plugin {op.name}: attribute {missing[0]} is missing; it takes {op.attributes}")
            self.attributes = {name: _number(op, name, attributes[name]) for name in op.attributes}
            self.plugin_name, self.plugin_namespace, self.plugin_version = op.name, DOMAIN, VERSION
            self.num_outputs = len(op.results)

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.attributes)

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

    return Plugin


def _build(trt: ModuleType, op: Op, shapes: Shapes) -> Any:
    base: Any = trt.IPluginV3OneBuild

    class Build(base):
        def get_output_data_types(self, types: Sequence[Any]) -> list[Any]:
            return [types[0], *(trt.DataType.INT64 for _ in op.results[1:])]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            return [_expressions(trt, sizes) for sizes in shapes(inputs)]

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
            run(op, self.attributes, (*input_desc, *output_desc), (*inputs, *outputs), stream)

    return Runtime


def run(
    op: Op, attributes: dict[str, int | float], described: Sequence[Any], addresses: Sequence[int], stream: int
) -> None:
    """Runs an op on a CUDA stream, on device memory at addresses; results come last in both sequences.

    Each description has `dims` and a `type` whose `name` is TensorRT's.
    """
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        memory = [_DeviceMemory(d.dims, d.type.name, a).tensor() for d, a in zip(described, addresses, strict=True)]
        inputs, outputs = memory[: len(op.inputs)], memory[len(op.inputs) :]
        capability = torch.cuda.get_device_capability(inputs[0].device)
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
    names = (*op.inputs, *op.results)
    return _FIXED_TYPES.get(names[position], first)


def _expressions(trt: ModuleType, sizes: Sequence[Any]) -> Any:
    dims = trt.DimsExprs(len(sizes))
    for index, size in enumerate(sizes):
        dims[index] = size
    return dims


def _number(op: Op, name: str, data: Any) -> int | float:
    value = np.asarray(data).reshape(-1)[0]
    return int(value) if _storage(op, name) is np.int64 else float(value)


def _storage(op: Op, name: str) -> type[np.generic]:
    return np.int64 if op.attribute_types[name] is int else np.float32


def _field_type(trt: ModuleType, op: Op, name: str) -> Any:
    kinds = trt.PluginFieldType
    return kinds.INT64 if _storage(op, name) is np.int64 else kinds.FLOAT32
