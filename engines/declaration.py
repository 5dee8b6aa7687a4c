"""What an engine depends on, as JSON values: a graph's declaration, the exporter's source, the libraries."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import export
import plugins
from engines.sessions.dtypes import NAMES
from engines.store import TensorRecord
from export.binding import Binding, WeightInput
from export.checkpoint import Checkpoint
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.tree import COMPONENTS
from export.graphs.graph import Axis, Graph, TensorSpec

LIBRARIES = ("diffusers", "onnx", "onnxruntime", "onnxscript", "torch", "transformers")
"""Packages whose version can change an engine or its comparison."""


def describe_graph(graph: Graph, binding: Binding) -> dict[str, Any]:
    """The declaration: tensors, axes, dtype, weights' places in the module; the same for equal graphs of any weights.

    Raises:
        ValueError: two instances make a parameter from their stored tensors in different ways.
    """
    structures = [_structures(graph, binding, i) for i in range(len(graph.weights))]
    for index, structure in enumerate(structures):
        odd = [name for name in structure if structure[name] != structures[0][name]]
        if odd:
            raise ValueError(f"graph {graph.name}: instance {index} makes {odd} in another way than instance 0")
    return {
        "name": graph.name,
        "inputs": [tensor_record(spec).model_dump() for spec in graph.inputs],
        "outputs": [tensor_record(spec).model_dump() for spec in graph.outputs],
        "axes": {name: vars(axis) for name, axis in axes(graph, binding).items()},
        "compute": NAMES[graph.compute],
        "variant": graph.variant,
        "weights": [tensor_record(spec).model_dump() for spec in binding.inputs],
        "instances": len(graph.weights),
        "parameters": structures[0],
    }


def describe_checkpoint(checkpoint: Checkpoint, partition: str) -> dict[str, Any]:
    """The checkpoint's layout and every component's configuration: what its engines depend on, which no shift is."""
    return {
        "layout": checkpoint.layout,
        "dimensions": checkpoint.dimensions.model_dump(exclude={"video_shift", "audio_shift"}),
        "configurations": {name: checkpoint.config(name, partition) for name in COMPONENTS},
    }


def describe_exporter() -> dict[str, Any]:
    """The exporter's own source and the versions of what it stands on."""
    return {"source": source_hash(_package_files(export) + _package_files(plugins)), "versions": versions()}


def versions() -> dict[str, str]:
    """Installed version of each of `LIBRARIES`; a host that only finishes a build need not have them all."""
    return {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe_backend(*modules: ModuleType) -> dict[str, Any]:
    """A backend's own source, in modules and packages, and the versions of what it stands on."""
    files = [
        file
        for module in modules
        for file in (_package_files(module) if hasattr(module, "__path__") else [Path(str(module.__file__))])
    ]
    return {"source": source_hash(files), "versions": versions()}


def source_hash(files: list[Path]) -> str:
    """SHA-256 of those files' names and content."""
    return hashlib.sha256(
        b"".join(f"{p.name} {p.stat().st_size}\n".encode() + p.read_bytes() for p in files)
    ).hexdigest()


def tensor_record(spec: TensorSpec | WeightInput) -> TensorRecord:
    """The manifest's record of an input, output or weight."""
    shape = tuple(d.name if isinstance(d, Axis) else d for d in spec.shape)
    return TensorRecord(name=spec.name, dtype=NAMES[spec.dtype], shape=shape)


def axes(graph: Graph, binding: Binding) -> dict[str, Axis]:
    """Every named axis of the graph."""
    specs: tuple[TensorSpec | WeightInput, ...] = (*graph.inputs, *graph.outputs, *binding.inputs)
    return {d.name: d for spec in specs for d in spec.shape if isinstance(d, Axis)}


def _package_files(package: ModuleType) -> list[Path]:
    return [file for root in package.__path__ for file in sorted(Path(root).rglob("*.py"))]


def _structures(graph: Graph, binding: Binding, instance: int) -> dict[str, Any]:
    names = {stored.key: name for name, stored in binding.instances[instance].items()}
    weights = sorted(graph.weights[instance].items())
    return {parameter: structure(weight, lambda stored: names[stored.key]) for parameter, weight in weights}


def structure(weight: Weight, name: Callable[[Stored], str]) -> list[Any]:
    """How a parameter is made of stored tensors, which `name` tells apart.

    An expression is told by its parts and the strides of its value, since its functions cannot be compared: tensors
    split per head and tensors stacked have the same shapes.
    """
    if isinstance(weight, Stored):
        return [name(weight)]
    value = weight.evaluate(lambda stored: torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
    parts = [structure(part, name) for part in _parts(weight)]
    return [type(weight).__name__, parts, list(value.shape), list(value.stride()), value.storage_offset()]


def _parts(weight: Weight) -> Iterator[Weight]:
    """The expressions that an expression is made of."""
    for value in vars(weight).values():
        yield from (part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Weight))
