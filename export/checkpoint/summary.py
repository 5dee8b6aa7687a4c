"""What a checkpoint holds, as data for `inspect` and reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.recipes import QKVLayout
from export.checkpoint.safetensors_file import DTYPE_NAMES
from export.checkpoint.tree import COMPONENTS, Component
from plugins.distilled import Distilled


@dataclass(frozen=True)
class ComponentSummary:
    """One component of one partition. `dtypes` maps a dtype's name to the bytes stored in it."""

    component: Component
    partition: str
    directory: str
    files: int
    tensors: int
    elements: int
    nbytes: int
    dtypes: dict[str, int]
    qkv_layout: QKVLayout


@dataclass(frozen=True)
class Summary:
    """A whole checkpoint. `nbytes` counts every safetensors file once, though partitions may share components.

    Directories and `tokenizer` are below the root, unless a student takes them from another place.
    """

    root: str
    layout: str
    partitions: tuple[str, ...]
    student: Distilled | None
    fingerprint: str
    tokenizer: str
    nbytes: int
    components: tuple[ComponentSummary, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, ready for JSON."""
        return asdict(self) | {"student": self.student and self.student.model_dump(mode="json")}


def summarise(checkpoint: Checkpoint) -> Summary:
    """Counts files, tensors, bytes and dtypes of every component; reads no tensor data."""
    components = tuple(
        _summarise_component(checkpoint, component, partition)
        for partition in checkpoint.partitions
        for component in COMPONENTS
    )
    files = {
        header.file: header.size
        for partition in checkpoint.partitions
        for component in COMPONENTS
        for header in checkpoint.catalogue(component, partition).files.headers
    }
    return Summary(
        root=str(checkpoint.root),
        layout=checkpoint.layout,
        partitions=checkpoint.partitions,
        student=checkpoint.student,
        fingerprint=checkpoint.fingerprint,
        tokenizer=_below(checkpoint, checkpoint.tokenizer_file),
        nbytes=sum(files.values()),
        components=components,
    )


def _summarise_component(checkpoint: Checkpoint, component: Component, partition: str) -> ComponentSummary:
    files = checkpoint.catalogue(component, partition).files
    dtypes: Counter[str] = Counter()
    for stored in files.tensors.values():
        dtypes[DTYPE_NAMES[stored.dtype]] += stored.nbytes
    return ComponentSummary(
        component=component,
        partition=partition,
        directory=_below(checkpoint, files.listing.parent),
        files=len(files.headers),
        tensors=len(files.tensors),
        elements=sum(prod(stored.shape) for stored in files.tensors.values()),
        nbytes=sum(dtypes.values()),
        dtypes=dict(sorted(dtypes.items())),
        qkv_layout=checkpoint.qkv_layout(component, partition),
    )


def _below(checkpoint: Checkpoint, path: Path) -> str:
    return str(path.relative_to(checkpoint.root) if path.is_relative_to(checkpoint.root) else path)
