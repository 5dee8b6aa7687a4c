"""The compiled layers of a plan: read from what TensorRT says of them, and counted.

TensorRT describes an engine's layers in two notations: in the builder's verbose log, as one message that begins with
"Layers:" (which needs no GPU), and as the JSON of IEngineInspector. Both need ProfilingVerbosity.DETAILED.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

ITEM_BITS: dict[str, int] = {
    "Float": 32,
    "Half": 16,
    "BFloat16": 16,
    "FP8": 8,
    "E8M0": 8,
    "FP4": 4,
    "Int4": 4,
    "Int8": 8,
    "UInt8": 8,
    "Int32": 32,
    "Int64": 64,
    "Bool": 8,
}
"""TensorRT's names of data types, and the bits of one element."""

NARROW_FIRST = ("FP4", "FP8", "Int4", "Int8", "Half", "BFloat16", "Float")
"""Types of matrix products, from the one that is hardest to get."""

LOG_TITLE = "Layers:\n"
"""How the message of the builder's log begins."""

# Names of formats that older releases put before the type, as in "Row major linear FP16 format"; and, in the builder's
# log, of the 4-bit type.
_FORMAT_TYPES = {
    "FP32": "Float",
    "FP16": "Half",
    "BF16": "BFloat16",
    "FP4E2M1": "FP4",
    "INT8": "Int8",
    "INT32": "Int32",
    "INT64": "Int64",
}

_SIZES = r"\[[-\d,]*\]"
_TENSOR = re.compile(
    rf"\{{ Name: (?P<name>(?:(?!, Dimensions: ).)*), Dimensions: \[(?P<shape>[-\d,]*)\]"
    rf"(?:, Strides: {_SIZES})?(?:, StrideOrder: {_SIZES})?"
    r", (?:Datatype: (?P<dtype>\w+), Format: [^{}]*|Format/Datatype: (?P<format>[^{}]*)) \}(?=, \{ Name: |$)"
)
_LIST = r"| \{ .*? \}"
_LINE = re.compile(
    rf"Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: \[(?P<inputs>{_LIST})\]"
    rf"(?:, Constants: \[(?P<constants>{_LIST})\])?, Outputs: \[(?P<outputs>{_LIST})\](?P<rest>(?:, [A-Z].*)?)"
)
_TACTIC = re.compile(r", Tactic(?:Name|Value)?: ([^,]*)")
_METADATA = re.compile(r", Metadata: (.*)$")
_ORIGIN = re.compile(r"\[ONNX Layer: (.*?)\]")

_ATTENTION = re.compile(r"mha|flash_attention|fused_attention", re.IGNORECASE)
# Myelin names a fusion by its parts in order: "__myl_FcMulAdd_myl0_7" is a matrix product and what follows it.
_FUSED_GEMM = re.compile(r"__myl_(?:[A-Z][a-z0-9]*)*?(?:Fc|Gemm|MatMul|Mma)(?![a-z])")
_GEMMS = ("gemm", "matrixmultiply", "fullyconnected", "caskgemmmatrixmultiply", "caskgemm", "fc")
_FUSIONS = ("runtime_fusion", "runtime_function", "kgen", "myelin")


class LayersError(ValueError):
    """A description of layers that is not understood; quotes the place."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerTensor(_Record):
    """What a layer reads or writes. `dtype` is TensorRT's name, such as "BFloat16"; a dynamic size is -1."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def nbytes(self, dynamic: int = 1) -> int:
        """Bytes at `dynamic` elements along each dynamic dimension."""
        elements = math.prod(dynamic if size < 0 else size for size in self.shape)
        return -(-elements * ITEM_BITS[self.dtype] // 8)


class Layer(_Record):
    """One compiled layer, which may do the work of many nodes or a part of one: `origins` names the ONNX nodes.

    A plan has its layers once for each optimisation profile.
    """

    name: str
    kind: str
    inputs: tuple[LayerTensor, ...]
    outputs: tuple[LayerTensor, ...]
    constants: tuple[LayerTensor, ...] = ()
    tactic: str = ""
    origins: tuple[str, ...] = ()

    @property
    def is_attention(self) -> bool:
        """Whether it is a whole attention in one kernel."""
        return self.kind.lower() == "attention" or bool(_ATTENTION.search(f"{self.name} {self.tactic}"))

    @property
    def is_gemm(self) -> bool:
        """Whether it computes a matrix product, alone or with what follows it."""
        kind = self.kind.lower()
        return not self.is_attention and (kind in _GEMMS or (kind in _FUSIONS and bool(_FUSED_GEMM.match(self.name))))

    @property
    def is_collective(self) -> bool:
        """Whether it exchanges data between ranks."""
        return self.kind.lower().startswith(("comm_", "distcollective", "nccl"))

    @property
    def is_plugin(self) -> bool:
        """Whether it is a plugin's."""
        return self.kind.lower().startswith("plugin")

    @property
    def gemm_dtype(self) -> str | None:
        """The type of a matrix product: the narrowest one that two of its operands have; None where no two agree."""
        return next((dtype for dtype in NARROW_FIRST if self.holds_twice(dtype)), None)

    def holds_twice(self, dtype: str) -> bool:
        """Whether two of its operands have that type, as both sides of a matrix product must."""
        return sum(tensor.dtype == dtype for tensor in (*self.inputs, *self.constants)) >= 2

    @property
    def census_kind(self) -> str:
        """What it counts as: "attention.fused", "gemm.FP8", "collective.all_to_all", "plugin.NAME", or its kind."""
        if self.is_attention:
            return "attention.fused"
        if self.is_gemm:
            return f"gemm.{self.gemm_dtype or 'mixed'}"
        if self.is_collective:
            return f"collective.{_collective(f'{self.kind} {self.name}')}"
        if self.is_plugin:
            return f"plugin.{self.tactic or self.name}"
        return self.kind


def census(layers: Iterable[Layer]) -> dict[str, int]:
    """How many layers of each kind there are, by `Layer.census_kind`."""
    return dict(sorted(Counter(layer.census_kind for layer in layers).items()))


def read_build_log(text: str) -> tuple[Layer, ...]:
    """The layers of the builder's "Layers:" message; what comes before its title and after its blank line is skipped.

    Raises:
        LayersError: there is no such message, or a line of it is not understood.
    """
    before, title, after = text.partition(LOG_TITLE)
    if not title or (before and not before.endswith("\n")):
        raise LayersError('no "Layers:" message, which the builder logs as VERBOSE under ProfilingVerbosity.DETAILED')
    return tuple(_line(line) for line in after.partition("\n\n")[0].split("\n") if line)


def read_inspector(text: str) -> tuple[Layer, ...]:
    """The layers of IEngineInspector's JSON (LayerInformationFormat.JSON) for a whole engine.

    Raises:
        LayersError: it is not that JSON, or has names of layers only (another verbosity).
    """
    try:
        listed = json.loads(text)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise LayersError(f"not the JSON of an engine inspector: {text[:80]!r}") from error
    return tuple(_entry(entry) for entry in listed)


def _line(line: str) -> Layer:
    match = _LINE.fullmatch(line)
    if match is None:
        raise LayersError(f"not a line about a layer: {line!r}")
    rest = match["rest"]
    metadata, tactic = _METADATA.search(rest), _TACTIC.search(rest)
    return Layer(
        name=match["name"],
        kind=match["kind"],
        inputs=tuple(_tensors(match["inputs"], line)),
        outputs=tuple(_tensors(match["outputs"], line)),
        constants=tuple(_tensors(match["constants"] or "", line)),
        tactic=tactic[1] if tactic else "",
        origins=_origins(metadata[1] if metadata else ""),
    )


def _tensors(listed: str, line: str) -> Iterator[LayerTensor]:
    """The tensors of a list such as " { Name: x, Dimensions: [-1,8], Datatype: Float, Format: ... }, { ... }"."""
    rest = listed.strip()
    while rest:
        match = _TENSOR.match(rest)
        if match is None:
            raise LayersError(f"not a tensor: {rest!r}, in {line!r}")
        shape = tuple(int(size) for size in match["shape"].split(",") if size)
        yield LayerTensor(name=match["name"], dtype=_dtype(match["dtype"] or match["format"]), shape=shape)
        rest = rest[match.end() :].removeprefix(", ")


def _entry(entry: Any) -> Layer:
    """A layer of the inspector's JSON."""
    if not isinstance(entry, dict):
        raise LayersError(f"{entry!r}: a layer's name alone; the plan was not built with ProfilingVerbosity.DETAILED")
    try:
        return Layer(
            name=entry["Name"],
            kind=entry["LayerType"],
            inputs=tuple(_inspected(tensor) for tensor in entry["Inputs"]),
            outputs=tuple(_inspected(tensor) for tensor in entry["Outputs"]),
            constants=tuple(_inspected(tensor) for tensor in entry.get("Constants", ())),
            tactic=str(entry.get("TacticName") or entry.get("TacticValue") or ""),
            origins=_origins(entry.get("Metadata", "")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LayersError(f"not a layer of an engine inspector ({error!r}): {entry!r}") from error


def _inspected(tensor: Mapping[str, Any]) -> LayerTensor:
    dtype = tensor["Datatype"] if "Datatype" in tensor else tensor["Format/Datatype"]
    return LayerTensor(name=tensor["Name"], dtype=_dtype(dtype), shape=tuple(tensor["Dimensions"]))


def _dtype(said: str) -> str:
    """TensorRT's name of a type, from that name or from a format that has it inside."""
    found = next((word for word in re.findall(r"\w+", said) if word in ITEM_BITS or word in _FORMAT_TYPES), None)
    if found is None:
        raise LayersError(f"{said!r}: not a data type; known: {', '.join(ITEM_BITS)}")
    return _FORMAT_TYPES.get(found, found)


def _origins(metadata: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_ORIGIN.findall(metadata)))


def _collective(text: str) -> str:
    """The operation of a collective, from its name."""
    lowered = re.sub(r"[^a-z]", "", text.lower())
    names = ("all_to_all", "all_gather", "all_reduce", "reduce_scatter", "broadcast", "gather", "scatter", "reduce")
    return next((name for name in names if name.replace("_", "") in lowered), "unknown")
