"""Turns a model's weight inputs into initializers whose data are the checkpoint's own bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import TensorProto

from export.checkpoint.expressions import Stored
from export.emitted import Emitted
from export.passes.name_tensors import onnx_dtype
from export.trace import instance_sizes


class BakeError(ValueError):
    """The weights cannot be named as external data of one model."""


def bake(emitted: Emitted, instance: int) -> onnx.ModelProto:
    """The model of one instance: weights are external data at their offset and length inside the safetensors files.

    A location is a bare file name, since ONNX Runtime and TensorRT refuse paths that leave the model's directory: put
    the model beside the files, hard-link them beside it (a symbolic link is refused by ONNX Runtime), or hand the bytes
    over (`add_external_initializers_from_files_in_memory`; TensorRT's `load_initializer`).

    Raises:
        BakeError: two of the files have the same name.
    """
    bindings = emitted.bindings[instance]
    _check_file_names(emitted, bindings)
    model = onnx.ModelProto()
    model.CopyFrom(emitted.model)
    kept = [value for value in model.graph.input if value.name not in bindings]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(_external(name, bindings[name]) for name in emitted.weight_names)
    _fix_sizes(model, instance_sizes(emitted.binding, instance))
    return model


def files(emitted: Emitted, instance: int) -> tuple[Path, ...]:
    """The safetensors files that the baked instance reads."""
    return tuple(sorted({stored.file for stored in emitted.bindings[instance].values()}))


def _check_file_names(emitted: Emitted, bindings: Mapping[str, Stored]) -> None:
    by_name: dict[str, Path] = {}
    for stored in bindings.values():
        other = by_name.setdefault(stored.file.name, stored.file)
        if other != stored.file:
            raise BakeError(f"graph {emitted.graph.name}: {other} and {stored.file} would have the same location")


def _external(name: str, stored: Stored) -> onnx.TensorProto:
    tensor = TensorProto(name=name, dims=stored.shape, data_type=onnx_dtype(stored.dtype).value)
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": stored.file.name, "offset": stored.offset, "length": stored.nbytes}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _fix_sizes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> None:
    """Axes that the weights had left open now have a size."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in sizes:
                dimension.dim_value = sizes[dimension.dim_param]
