"""What an operation of domain `h3` is: one entry that torch, ONNX, ONNX Runtime and TensorRT all read."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from plugins.exchanges import GROUP

if TYPE_CHECKING:
    import onnx

DOMAIN = "h3"
"""ONNX domain and torch namespace of every entry."""

DOMAIN_VERSION = 1

ONNX_OPSET = 23
"""Version of the standard operators that function bodies and graphs are written in (first with Attention)."""

TENSOR_TYPES = tuple(
    f"tensor({name})" for name in ("float", "float16", "bfloat16", "double", "int64", "float8e4m3fn", "uint8")
)
"""ONNX types that an operation's inputs may have."""


Shapes = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Sequence[Any]]]
"""Sizes of each result, TensorRT's expressions or numbers, from its expressions of the sizes of each input (those of
`Op.tensors`) and from the op's attributes."""


@dataclass(frozen=True)
class Fast:
    """An implementation for one kind of device: `function` has the reference's signature.

    `minimum` is the lowest compute capability (major, minor) that it runs on; (0, 0) where the device has none.
    `below` is the first that it does not: machine code of one architecture runs on no later one.
    `plain`: it is made of torch's own operators, which a compiler may fuse with their neighbours.
    """

    device: str
    function: Callable[..., Any]
    minimum: tuple[int, int] = (0, 0)
    plain: bool = False
    below: tuple[int, int] = (1000, 0)


@dataclass(frozen=True)
class Op:
    """One operation. The annotated `reference` is the schema: tensors are inputs, numbers are attributes, in order.

    `reference` is plain torch and keeps float64 when given float64, so that it can be checked against a formula.
    `fake` gives the result's shape and dtype without data. `body` says the same in standard operators, as the
    text of an ONNX function's statements; inputs and @attributes have the reference's names, outputs those of
    `results`; an op with several of these returns a tuple. `plugin_shapes` makes it a TensorRT plugin
    (`plugins.tensorrt_plugin`); without them TensorRT takes the op by its name or inlines the function.
    `result_types`: their ONNX types, where they are not the first input's and, of all but the first result, int64.
    `fused`: a compiler that takes the reference apart, and fuses it with its neighbours, does better than a fast
    implementation that it can only call. `calls`: texts of further functions of this domain, which
    the body calls.
    """

    name: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    body: str
    fast: tuple[Fast, ...] = ()
    plugin_shapes: Shapes | None = None
    results: tuple[str, ...] = ("result",)
    result_types: tuple[str, ...] = ()
    fused: bool = False
    calls: tuple[str, ...] = ()

    @cached_property
    def schema(self) -> str:
        """Torch schema of the arguments and the result, such as `(Tensor x, float eps) -> Tensor`."""
        return torch.library.infer_schema(self.reference, mutates_args=())

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensor arguments."""
        return tuple(n for n, kind in self._parameters.items() if kind is torch.Tensor)

    @property
    def exchanges(self) -> bool:
        """Whether it needs the other ranks of a group, whose handle is one of its inputs."""
        return GROUP in self.inputs

    @property
    def tensors(self) -> tuple[str, ...]:
        """The inputs that are data: all but the handle of a group."""
        return tuple(name for name in self.inputs if name != GROUP)

    @cached_property
    def attributes(self) -> tuple[str, ...]:
        """Names of the number arguments, which are ONNX attributes."""
        return tuple(n for n, kind in self._parameters.items() if kind is not torch.Tensor)

    @cached_property
    def attribute_types(self) -> dict[str, type]:
        """int or float, by name of the number argument."""
        return {name: self._parameters[name] for name in self.attributes}

    @cached_property
    def torch_op(self) -> torch.library.CustomOpDef:
        """The torch.library operator; registered when first used."""
        op = torch.library.custom_op(f"{DOMAIN}::{self.name}", self._run, mutates_args=(), schema=self.schema)
        op.register_fake(self.fake)
        return op

    @cached_property
    def overload(self) -> torch._ops.OpOverload:
        """The operator as it appears in traced graphs."""
        assert self.torch_op  # registers it
        return getattr(getattr(torch.ops, DOMAIN), self.name).default

    def __call__(self, *args: Any) -> Any:
        """Calls the torch operator: the best implementation for the tensors' device, one node when traced."""
        return self.torch_op(*args)

    def implementation(self, device: str, capability: tuple[int, int] = (0, 0)) -> Callable[..., Any]:
        """The first fast implementation that fits the device, else the reference."""
        fits = (f.function for f in self.fast if f.device == device and f.minimum <= capability < f.below)
        return next(fits, self.reference)

    def plain_implementation(
        self, device: str, capability: tuple[int, int] = (0, 0)
    ) -> Callable[..., torch.Tensor] | None:
        """The implementation for a device, where a compiler can look into it; None for one that it must call."""
        if self.exchanges:
            return None  # its group is found when it runs
        if self.fused:
            return self.reference
        opaque = {f.function for f in self.fast if not f.plain}
        found = self.implementation(device, capability)
        return None if found in opaque else found

    def function(self) -> onnx.FunctionProto:
        """The ONNX function that says the operation in standard operators."""
        from onnx import parser

        attributes = f"<{', '.join(self.attributes)}>" if self.attributes else ""
        ours = f', "{DOMAIN}" : {DOMAIN_VERSION}' if self.calls else ""
        return parser.parse_function(
            f'<opset_import: ["" : {ONNX_OPSET}{ours}], domain: "{DOMAIN}"> '
            f"{self.name} {attributes} ({', '.join(self.inputs)}) => ({', '.join(self.results)}) {{ {self.body} }}"
        )

    def called_functions(self) -> list[onnx.FunctionProto]:
        """The functions that `function` calls."""
        from onnx import parser

        return [parser.parse_function(text) for text in self.calls]

    def onnx_schema(self) -> onnx.defs.OpSchema:
        """The ONNX operator schema; inputs are untyped, the function body says what they may be."""
        from onnx.defs import OpSchema

        kinds = {int: OpSchema.AttrType.INT, float: OpSchema.AttrType.FLOAT}
        attributes = [OpSchema.Attribute(n, kinds[self._parameters[n]], required=True) for n in self.attributes]
        parameters = [OpSchema.FormalParameter(n, f"T_{n}") for n in self.inputs]
        return OpSchema(
            self.name,
            DOMAIN,
            DOMAIN_VERSION,
            inputs=parameters,
            outputs=[OpSchema.FormalParameter(n, t) for n, t in zip(self.results, self.types_of_results, strict=True)],
            type_constraints=[(f"T_{n}", list(TENSOR_TYPES), "") for n in self.inputs],
            attributes=attributes,
        )

    @property
    def types_of_results(self) -> tuple[str, ...]:
        """ONNX types, or `T_x` for that of input x.

        The first result has the first input's type; what an op counts beside it is int64.
        """
        return self.result_types or (f"T_{self.inputs[0]}", *("tensor(int64)" for _ in self.results[1:]))

    @cached_property
    def _parameters(self) -> dict[str, type]:
        hints = typing.get_type_hints(self.reference)
        return {name: hints[name] for name in inspect.signature(self.reference).parameters}

    def _run(self, *args: Any) -> Any:
        device = args[0].device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        return self.implementation(device.type, capability)(*args)
