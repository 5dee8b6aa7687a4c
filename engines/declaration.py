"""What an engine depends on, as JSON values: a graph's declaration, the exporter's source, the libraries."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import export
import plugins
from engines.store import Dtype, TensorRecord
from export.binding import Binding, WeightInput
from export.checkpoint import Checkpoint
from export.checkpoint.expressions import Concat, Mapped, Stored, Weight
from export.graphs.graph import Axis, Graph, TensorSpec

LIBRARIES = ("diffusers", "onnx", "onnxruntime", "onnxscript", "torch", "transformers")
"""Packages whose version can change an engine or its comparison."""

DTYPES: dict[torch.dtype, Dtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}


def describe_graph(graph: Graph, binding: Binding) -> dict[str, Any]:
    """The declaration: tensors, axes, dtype, weights' places in the module; the same for equal graphs of any weights.

    Raises:
        ValueError: two instances make a parameter from their stored tensors in different ways.
    """
    structures = [_structures(graph, binding, i) for i in range(len(graph.weights))]
    for index, structure in enumerate(structures):
        odd = [name for name in structure if structure[name] != structures[0][name]]
        if odd and not graph.weight_axes:
            raise ValueError(f"graph {graph.name}: instance {index} makes {odd} in another way than instance 0")
    return {
        "name": graph.name,
        "inputs": [tensor_record(spec).model_dump() for spec in graph.inputs],
        "outputs": [tensor_record(spec).model_dump() for spec in graph.outputs],
        "axes": {name: vars(axis) for name, axis in axes(graph, binding).items()},
        "compute": DTYPES[graph.compute],
        "weights": [tensor_record(spec).model_dump() for spec in binding.inputs],
        "instances": len(graph.weights),
        "parameters": structures[0],
    }


def describe_checkpoint(checkpoint: Checkpoint, partition: str) -> dict[str, Any]:
    """The checkpoint's layout and every component's configuration."""
    components = ("denoiser", "text_encoder", "video_vae", "audio_vae")
    return {
        "layout": checkpoint.layout,
        "dimensions": checkpoint.dimensions.model_dump(),
        "configurations": {name: checkpoint.config(name, partition) for name in components},
    }


def describe_exporter() -> dict[str, Any]:
    """The exporter's own source and the versions of what it stands on."""
    return {"source": source_hash(export, plugins), "versions": versions()}


def versions() -> dict[str, str]:
    """Installed version of each of `LIBRARIES`."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def source_hash(*modules: ModuleType) -> str:
    """SHA-256 of the Python source of packages (all files in them) and modules."""
    digest = hashlib.sha256()
    for module in modules:
        for root in module.__path__ if hasattr(module, "__path__") else [str(module.__file__)]:
            for file in sorted(Path(root).rglob("*.py")) if Path(root).is_dir() else [Path(root)]:
                digest.update(f"{module.__name__} {file.name} {file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def tensor_record(spec: TensorSpec | WeightInput) -> TensorRecord:
    """The manifest's record of an input, output or weight."""
    shape = tuple(d.name if isinstance(d, Axis) else d for d in spec.shape)
    return TensorRecord(name=spec.name, dtype=DTYPES[spec.dtype], shape=shape)


def axes(graph: Graph, binding: Binding) -> dict[str, Axis]:
    """Every named axis of the graph."""
    specs = (*graph.inputs, *graph.outputs, *binding.inputs)
    return {d.name: d for spec in specs for d in spec.shape if isinstance(d, Axis)}


def _structures(graph: Graph, binding: Binding, instance: int) -> dict[str, Any]:
    names = {stored.key: name for name, stored in binding.instances[instance].items()}
    return {parameter: _structure(weight, names)[0] for parameter, weight in sorted(graph.weights[instance].items())}


def _structure(weight: Weight, names: Mapping[str, str]) -> tuple[list[Any], torch.Tensor]:
    """How a parameter is made of stored tensors, and the parameter without data.

    A view is told by the strides it gives: tensors split per head and tensors stacked have the same shapes.
    """
    if isinstance(weight, Stored):
        return [names[weight.key]], torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    if isinstance(weight, Mapped):
        source, tensor = _structure(weight.source, names)
        view = weight.function(tensor)
        return [source, list(view.shape), list(view.stride()), view.storage_offset()], view
    if isinstance(weight, Concat):
        parts = [_structure(part, names) for part in weight.parts]
        return ["concat", *(part[0] for part in parts)], torch.cat([part[1] for part in parts])
    raise TypeError(f"unknown weight expression {type(weight).__name__}")
