"""Compares an emitted model, run by ONNX Runtime, with its torch module run eagerly on the same checkpoint bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import onnxruntime
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from export.checkpoint import materialise
from export.emitted import Emitted
from export.graphs.graph import TensorSpec
from export.passes.name_tensors import onnx_dtype
from export.passes.widen import widen
from export.trace import BoundModule, instance_sizes, resolve


@dataclass(frozen=True)
class Difference:
    """Largest |ONNX Runtime - eager| of one output at one trial, relative to the output's largest magnitude."""

    sizes: Mapping[str, int]
    output: str
    relative: float


@dataclass(frozen=True)
class Comparison:
    """All differences of one instance of a graph; every one is within `tolerance`."""

    graph: str
    instance: int
    tolerance: float
    differences: tuple[Difference, ...]

    @property
    def worst(self) -> float:
        """The largest difference."""
        return max(d.relative for d in self.differences)


class CompareError(ValueError):
    """An emitted model does not compute what its module does."""


def compare(emitted: Emitted, instance: int = 0, seed: int = 0) -> Comparison:
    """Runs the graph's trials on random inputs.

    A graph of a half precision is compared with all its roundings taken out of both sides, as ONNX Runtime has no
    bfloat16 matrix product on a CPU and a rounded comparison would hide a wrong graph. Stored weights keep their bytes.

    Raises:
        CompareError: a difference is above the graph's tolerance, or an output has another shape or is not finite.
    """
    runner = _Runner(emitted, instance)
    generator = torch.Generator().manual_seed(seed)
    fixed = instance_sizes(emitted.binding, instance)
    differences: list[Difference] = []
    for trial in emitted.graph.trials:
        sizes = {**trial, **fixed}
        inputs = tuple(draw(spec, sizes, generator) for spec in emitted.graph.inputs)
        pairs = zip(emitted.graph.outputs, runner.eager(inputs), runner.onnxruntime(inputs), strict=True)
        differences += [_difference(emitted, sizes, *pair) for pair in pairs]
    return Comparison(emitted.graph.name, instance, emitted.graph.tolerance, tuple(differences))


def draw(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
    """A trial's input: what its declaration makes, or else standard normal, or integers below the declared bound."""
    if spec.trial is not None:
        return spec.trial(sizes)
    shape = resolve(spec.shape, sizes)
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(spec.dtype)
    below = spec.below if isinstance(spec.below, int) else sum(sizes[axis.name] for axis in spec.below)
    return torch.randint(below, shape, generator=generator, dtype=spec.dtype)


class Widened(TorchDispatchMode):
    """Within it, what asks for a half precision gets float32: eager torch without roundings."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: torch.float32 if _is_half(x) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Runner:
    """Both sides of a comparison, with one instance's weights mapped from the checkpoint."""

    def __init__(self, emitted: Emitted, instance: int) -> None:
        bindings = emitted.bindings[instance]
        self._weights = tuple(materialise(bindings[name]) for name in emitted.weight_names)
        self._module = BoundModule(emitted.graph, emitted.binding, instance)
        self._names = [spec.name for spec in emitted.graph.inputs] + list(emitted.weight_names)
        self._wide = emitted.graph.compute in _HALVES
        self._session = open_session(widen(emitted.model) if self._wide else emitted.model)

    def eager(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            if self._wide:
                with Widened():
                    result = self._module(_to_float(inputs), _to_float(self._weights))
            else:
                result = self._module(inputs, self._weights)
        return result if isinstance(result, tuple) else (result,)

    def onnxruntime(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        values = (*inputs, *self._weights)
        if self._wide:
            values = _to_float(values)
        feed = {name: ort_value(tensor) for name, tensor in zip(self._names, values, strict=True)}
        return tuple(torch.from_numpy(v.numpy()) for v in self._session.run_with_ort_values(None, feed))


def open_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A stock CPU session of a model held in memory."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def ort_value(tensor: torch.Tensor) -> onnxruntime.OrtValue:
    """The tensor for ONNX Runtime; numpy has neither bfloat16 nor 8-bit floats, so their bits travel as integers."""
    tensor = tensor.contiguous()
    integers = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype)
    if integers is None:
        return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())
    bits = tensor.view(integers).numpy()
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx_dtype(tensor.dtype).value)


_HALVES = frozenset({torch.bfloat16, torch.float16})


def _is_half(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in _HALVES


def _to_float(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(t.float() if t.dtype in _HALVES else t for t in tensors)


def _difference(
    emitted: Emitted, sizes: Mapping[str, int], spec: TensorSpec, expected: torch.Tensor, found: torch.Tensor
) -> Difference:
    graph, where = emitted.graph, f"graph {emitted.graph.name}, output {spec.name}, sizes {dict(sizes)}"
    shape = resolve(spec.shape, sizes)
    if tuple(expected.shape) != shape or tuple(found.shape) != shape:
        raise CompareError(f"{where}: declared {shape}, eager {expected.shape}, ONNX Runtime {found.shape}")
    # Where all is zero, as with a checkpoint of sparse files, the difference itself.
    scale = expected.double().abs().max().item() or 1.0
    relative = (found.double() - expected.double()).abs().max().item() / scale
    if not relative <= graph.tolerance:
        raise CompareError(f"{where}: relative difference {relative:.3g}, tolerance {graph.tolerance:.3g}")
    return Difference(dict(sizes), spec.name, relative)
