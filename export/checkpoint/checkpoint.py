"""A checkpoint on disk, whichever of the two layouts it has; or a student, which points into one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from export.checkpoint.catalogue import Catalogue, read_catalogue, replace_tensors
from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.hashes import read_sums, verify_sums
from export.checkpoint.recipes import QKVLayout
from export.checkpoint.safetensors_file import Header
from export.checkpoint.sizes import read_dimensions, student_dimensions
from export.checkpoint.student import (
    PARTITION,
    STUDENT,
    Fused,
    Student,
    Whole,
    base_of,
    declared_student,
    is_student,
    place_of,
    read_student,
)
from export.checkpoint.tree import COMPONENTS, DIFFUSERS_STEM, Component, LayoutName, Place, Tree, find_tree
from plugins.dimensions import Dimensions
from plugins.distilled import Distilled


class Checkpoint:
    """Configuration and lazy weights of every component. Use `Checkpoint.open`, which reads no tensor data.

    Attributes: `root`; `layout` ("native" or "diffusers", of a student that of its base, though the transformer may
    have another); `partitions` (of "fl2va", "ref2va", those present); `dimensions`, every size that later layers read
    (all partitions have the same), a student's shifts among them; `student`, the schedule and the attention that the
    model is bound to, None for the released one, which is free; `base`, the checkpoint that a student is of.
    """

    root: Path
    layout: LayoutName
    partitions: tuple[str, ...]
    dimensions: Dimensions
    student: Distilled | None
    base: Checkpoint | None

    def __init__(self, tree: Tree, catalogues: Mapping[tuple[Component, str], Catalogue]) -> None:
        self._tree = tree
        self._catalogues = catalogues
        self.root = tree.root
        self.layout = tree.layout
        self.partitions = tree.partitions
        self.dimensions = read_dimensions(tree, catalogues)
        self.student = declared_student(tree)
        self.base = None

    @staticmethod
    def open(path: Path | str) -> Checkpoint:
        """Recognises the layout, reads every configuration file and safetensors header, and checks them.

        Raises:
            CheckpointError: a file is missing, truncated, overlapping or mis-sized, an index disagrees with its
                shards, or a tensor is missing, unexpected or of another shape or dtype than configured.
        """
        if is_student(Path(path)):
            return _OpenedStudent(Path(path))
        tree = find_tree(Path(path))
        catalogues: dict[tuple[Component, str], Catalogue] = {}
        read: dict[Place, Catalogue] = {}
        for partition in tree.partitions:
            for component in COMPONENTS:
                place = tree.place(component, partition)
                if place not in read:
                    read[place] = read_catalogue(component, tree.layout, place)
                catalogues[component, partition] = read[place]
        return Checkpoint(tree, catalogues)

    def stored(self, component: Component, partition: str = "fl2va") -> Mapping[str, Stored]:
        """Every tensor of a component as it lies in the files, by the key that it has there."""
        return self.catalogue(component, partition).files.tensors

    def parameters(self, component: Component, partition: str = "fl2va") -> Mapping[str, Weight]:
        """Every parameter by its diffusers or transformers name, as an expression over stored tensors."""
        return self.catalogue(component, partition).parameters

    def config(self, component: Component, partition: str = "fl2va") -> dict[str, Any]:
        """Constructor arguments of the diffusers class, or of `transformers.Qwen3VLConfig` for the text encoder."""
        return dict(self.catalogue(component, partition).arguments)

    def qkv_layout(self, component: Component, partition: str = "fl2va") -> QKVLayout:
        """How the stored attention projections are laid out: split, interleaved (per head) or stacked."""
        return self.catalogue(component, partition).qkv_layout

    def catalogue(self, component: Component, partition: str = "fl2va") -> Catalogue:
        """Everything that was read of one component.

        Raises:
            CheckpointError: the checkpoint has no such partition.
        """
        if partition not in self.partitions:
            raise CheckpointError(self.root, "partition", f"one of {', '.join(self.partitions)}", partition)
        return self._catalogues[component, partition]

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer.json that prompts are encoded with."""
        return self._tree.tokenizer_file

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over configurations, tokenizer, processor, and safetensors headers and sizes (no data)."""
        described = {file for one in self._catalogues.values() for file in one.config_files}
        described |= {file for name in self.partitions for file in self._tree.schedule_files(name)}
        described |= {self.tokenizer_file, *self._tree.processor_files}
        return _digest(_described(self.root, described, self._headers))

    @cached_property
    def sample(self) -> str:
        """SHA-256 over a sample of every safetensors file: other weights of the same shapes differ in it.

        It is for telling checkpoints apart in a moment, not for finding damage, which `verify_hashes` is for.

        Raises:
            CheckpointError: a student's base holds other data than it was made from.
        """
        return _digest(header.sample() for _, header in sorted(self._headers.items()))

    @property
    def _headers(self) -> dict[Path, Header]:
        return {header.file: header for one in self._catalogues.values() for header in one.files.headers}

    def listed_files(self) -> tuple[Path, ...]:
        """The files that the root's SHA256SUMS lists, and a student's base's; none where there is no list.

        Raises:
            CheckpointError: a list is malformed.
        """
        return (*read_sums(self.root), *(self.base.listed_files() if self.base else ()))

    def verify_hashes(self, progress: Callable[[Path], None] = lambda file: None) -> tuple[Path, ...]:
        """Hashes every file that the root's SHA256SUMS lists, calling `progress` before each; returns those files.

        A student's base is verified as well, where it has a list.

        Raises:
            CheckpointError: there is no list, or a file is missing or differs.
        """
        based = self.base.verify_hashes(progress) if self.base and self.base.listed_files() else ()
        return (*verify_sums(self.root, progress), *based)


class _OpenedStudent(Checkpoint):
    """A student: its base, with another transformer."""

    def __init__(self, root: Path) -> None:
        record = read_student(root)
        base = _open_base(root, record)
        transformer = _transformer(root, record, base)
        self._record = record
        self._tree = Tree(base.root, base.layout, {PARTITION: base._tree.folders[PARTITION]})
        self._catalogues = {(c, PARTITION): base.catalogue(c, PARTITION) for c in COMPONENTS}
        self._catalogues["denoiser", PARTITION] = transformer
        self.root = root
        self.layout = base.layout
        self.partitions = (PARTITION,)
        self.dimensions = student_dimensions(base.dimensions, record.distilled)
        self.student = record.distilled
        self.base = base

    @cached_property
    def fingerprint(self) -> str:
        """As of any checkpoint, over the base's own, the transformer, and what student.json says but for places."""
        transformer = self._catalogues["denoiser", PARTITION]
        base = set(self._based._headers)
        own = {file: header for file, header in self._headers.items() if file not in base}
        configs = [] if isinstance(self._record.transformer, Fused) else transformer.config_files
        place = next(iter(own)).parent
        lines = [self._record.base.fingerprint, self._record.distilled.model_dump_json()]
        return _digest(f"{line}\n" for line in (*lines, *_described(place, configs, own)))

    @cached_property
    def sample(self) -> str:
        """As of any checkpoint. Raises CheckpointError."""
        expected, found = self._record.base.sample, self._based.sample
        if found != expected:
            wanted = f"{self._based.root} with the data it was made from, of sample {expected}"
            raise CheckpointError(self.root / STUDENT, "base.sample", wanted, f"{found}; {_again(self.root)}")
        return super().sample

    @property
    def _based(self) -> Checkpoint:
        assert self.base is not None
        return self.base


def _open_base(root: Path, record: Student) -> Checkpoint:
    file, place = root / STUDENT, base_of(root, record)
    base = Checkpoint.open(place)
    if base.student is not None:
        raise CheckpointError(file, "base.path", "the released model", f"one with a schedule of its own: {place}")
    if PARTITION not in base.partitions:
        raise CheckpointError(file, "base.path", f"a checkpoint with partition {PARTITION}", place)
    if base.fingerprint != record.base.fingerprint:
        wanted = f"{place} as it was made from, of fingerprint {record.base.fingerprint}"
        raise CheckpointError(file, "base.fingerprint", wanted, f"{base.fingerprint}; {_again(root)}")
    return base


def _again(root: Path) -> str:
    return f"name the right base there, or make {root} anew with h3trt adapters fuse"


def _transformer(root: Path, record: Student, base: Checkpoint) -> Catalogue:
    based = base.catalogue("denoiser", PARTITION)
    match record.transformer:
        case Fused(file=name, bytes=size):
            catalogue = replace_tensors(based, base.layout, root / name, record.gates)
            found = catalogue.files.headers[-1].size
            if found != size:
                raise CheckpointError(root / STUDENT, "transformer.bytes", f"{found}, as {name} has", size)
            return catalogue
        case Whole(path=path):
            place = place_of(root, path)
            read = read_catalogue("denoiser", "diffusers", Place(place, place, DIFFUSERS_STEM), record.gates)
            if read.config != based.config:
                wanted = f"the configuration of the base's transformer, {based.config_files[0]}"
                raise CheckpointError(read.config_files[0], "configuration", wanted, "another")
            return read


def _described(root: Path, files: Iterable[Path], headers: Mapping[Path, Header]) -> Iterator[str]:
    """A line for each file: its place below the root, and a hash of its content, or of its header and its size."""
    lines = [(file, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    lines += [(file, f"{header.size}:{header.digest}") for file, header in headers.items()]
    return (f"{file.relative_to(root).as_posix()}:{line}\n" for file, line in sorted(lines))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()
