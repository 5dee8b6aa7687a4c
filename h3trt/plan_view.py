"""What `h3trt inspect` shows of a TensorRT plan: its layers, their precision and memory, as tables and as a drawing."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from engines.layers import Layer, LayersError, LayerTensor, read_inspector
from engines.store import MANIFEST, AxisRange, EngineRecord, EngineStore, write_atomically
from h3trt.exits import CommandError, Exit

_PLAN_NAME = re.compile(r"(?P<graph>.+)\.[0-9a-f]{16}(?P<instance>(\.\d+)?)\.plan")
_LAYERS_NAME = re.compile(r"(?P<graph>.+)\.[0-9a-f]{16}(?P<instance>(\.\d+)?)\.layers\.json")

BIGGEST = 10
"""Tensors that are listed."""

Row = tuple[str, ...]

_LAYERS = TypeAdapter(tuple[Layer, ...])


@dataclass(frozen=True)
class PlanView:
    """A plan's layers, and what the store it lies in says of it. `rows` is what a dynamic size counts as."""

    layers: tuple[Layer, ...]
    facts: tuple[str, ...]
    rows: int

    @staticmethod
    def open(path: Path, rows: int | None) -> PlanView:
        """Reads a plan's layers: of a store's plan from the file beside it, or from a JSON file of layers.

        That JSON is a build's or an IEngineInspector's. Without `rows` it is the largest size that the store tells,
        or 1.

        Raises:
            CommandError: no such file, a plan without its layers' file, or not a file of layers.
        """
        record = _record(path) if path.suffix == ".plan" else None
        layers = _read(_layers_file(path) if path.suffix == ".plan" else path)
        return PlanView(layers, _facts(record), rows or _largest(record))

    def totals(self) -> list[Row]:
        """For each kind of layer: how many, the bytes that they write, and their share."""
        counts = Counter(layer.census_kind for layer in self.layers)
        sizes = self.bytes_by_kind()
        whole = sum(sizes.values()) or 1
        return [(kind, str(counts[kind]), f"{size:,}", f"{size / whole:.1%}") for kind, size in sizes.items()]

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that the layers of each kind write, most first."""
        sizes: Counter[str] = Counter({layer.census_kind: 0 for layer in self.layers})
        for layer in self.layers:
            sizes[layer.census_kind] += self._written(layer)
        return dict(sizes.most_common())

    def rows_of_layers(self) -> list[Row]:
        """For each layer in the order of execution: its name, kind, precision, and the bytes that it writes."""
        return [
            (layer.name, layer.census_kind, _precision(layer), f"{self._written(layer):,}") for layer in self.layers
        ]

    def biggest_tensors(self) -> list[Row]:
        """The largest tensors that layers write: name, type, shape, bytes."""
        tensors = {tensor.name: tensor for layer in self.layers for tensor in layer.outputs}
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.nbytes(self.rows), reverse=True)
        return [(t.name, t.dtype, _shape(t), f"{t.nbytes(self.rows):,}") for t in ordered[:BIGGEST]]

    def draw(self, svg: Path, title: str) -> None:
        """Draws the bytes by kind of layer as bars.

        Raises:
            CommandError: matplotlib is not installed.
        """
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError as error:
            raise CommandError(f"--svg {svg}: needs matplotlib; run: pip install matplotlib") from error
        sizes = {kind: size for kind, size in self.bytes_by_kind().items() if size}
        figure = Figure(figsize=(8, 1.5 + 0.35 * len(sizes)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(list(sizes), [size / 1e6 for size in sizes.values()])
        axes.bar_label(bars, labels=[f"{size / 1e6:,.1f}" for size in sizes.values()], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set(title=title, xlabel=f"MB written by layers of a kind, dynamic sizes at {self.rows:,}")
        drawn = io.BytesIO()
        with rc_context({"svg.hashsalt": "h3trt"}):  # the same plan gives the same file
            figure.savefig(drawn, format="svg", metadata={"Date": None})
        write_atomically(svg, drawn.getvalue())

    def _written(self, layer: Layer) -> int:
        return sum(tensor.nbytes(self.rows) for tensor in layer.outputs)


def _record(plan: Path) -> EngineRecord | None:
    """The manifest's entry of a plan, if it lies in a store whose manifest names it."""
    root = next((parent for parent in plan.absolute().parents if (parent / MANIFEST).is_file()), None)
    if root is None:
        return None
    engines = EngineStore.open(root, to_run=False).manifest.graphs.values()
    return next((e for e in engines if (root / e.file.path).samefile(plan)), None) if plan.is_file() else None


def _layers_file(plan: Path) -> Path:
    """The file of layers beside a plan: the same name but for the hash, which is of the file's own bytes."""
    if not plan.is_file():
        raise CommandError(f"{plan}: no such file")
    name = _PLAN_NAME.fullmatch(plan.name)
    found = [file for file in plan.parent.iterdir() if name and _same_graph(name, _LAYERS_NAME.fullmatch(file.name))]
    if len(found) != 1:
        raise CommandError(f"{plan}: one file of its layers (.layers.json) expected beside it, {len(found)} found")
    return found[0]


def _same_graph(plan: re.Match[str], layers: re.Match[str] | None) -> bool:
    return layers is not None and plan.group("graph", "instance") == layers.group("graph", "instance")


def _read(path: Path) -> tuple[Layer, ...]:
    text = path.read_text()
    try:
        if isinstance(json.loads(text), dict):
            return read_inspector(text)
        return _LAYERS.validate_json(text)
    except (ValidationError, LayersError, ValueError) as error:
        what = "layers of a build or of an IEngineInspector (LayerInformationFormat.JSON) expected"
        raise CommandError(f"{path}: {what}: {str(error).splitlines()[0]}", Exit.ENGINES) from error


def _facts(record: EngineRecord | None) -> tuple[str, ...]:
    plan = record.plan if record is not None else None
    if plan is None:
        return ()
    return (
        f"compute capability {', '.join(plan.capabilities)}; {plan.activation_bytes:,} bytes of activations",
        f"built in {plan.seconds:.1f} s with {plan.peak_host_bytes:,} bytes of host memory",
        *(f"profile {i}: {_ranges(profile)}" for i, profile in enumerate(plan.profiles)),
    )


def _ranges(profile: Mapping[str, AxisRange]) -> str:
    return ", ".join(f"{name} {axis.minimum:,} to {axis.maximum:,}" for name, axis in profile.items())


def _largest(record: EngineRecord | None) -> int:
    plan = record.plan if record is not None else None
    if record is None or plan is None:
        return 1
    named = {size for tensor in record.inputs for size in tensor.shape if isinstance(size, str)}
    return max((r.maximum for p in plan.profiles for name, r in p.items() if name in named), default=1)


def _precision(layer: Layer) -> str:
    return layer.gemm_dtype or "mixed" if layer.is_gemm else ", ".join(sorted({t.dtype for t in layer.outputs}))


def _shape(tensor: LayerTensor) -> str:
    return "[" + ", ".join("*" if size < 0 else str(size) for size in tensor.shape) + "]"
