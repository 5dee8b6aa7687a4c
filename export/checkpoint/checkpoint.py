"""A checkpoint on disk, whichever of the two layouts it has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from export.checkpoint.catalogue import Catalogue, read_catalogue
from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.hashes import read_sums, verify_sums
from export.checkpoint.recipes import QKVLayout
from export.checkpoint.safetensors_file import Header
from export.checkpoint.sizes import read_dimensions
from export.checkpoint.tree import COMPONENTS, Component, LayoutName, Place, Tree, find_tree
from plugins.dimensions import Dimensions
from plugins.distilled import Distilled


class Checkpoint:
    """Configuration and lazy weights of every component. Use `Checkpoint.open`, which reads no tensor data.

    Attributes: `root`; `layout` ("native" or "diffusers"); `partitions` (of "fl2va", "ref2va", those present);
    `dimensions`, every size that later layers read (all partitions have the same).
    """

    root: Path
    layout: LayoutName
    partitions: tuple[str, ...]
    dimensions: Dimensions
    student: Distilled | None = None

    def __init__(self, tree: Tree, catalogues: Mapping[tuple[Component, str], Catalogue]) -> None:
        self._tree = tree
        self._catalogues = catalogues
        self.root = tree.root
        self.layout = tree.layout
        self.partitions = tree.partitions
        self.dimensions = read_dimensions(tree, catalogues)

    @staticmethod
    def open(path: Path | str) -> Checkpoint:
        """Recognises the layout, reads every configuration file and safetensors header, and checks them.

        Raises:
            CheckpointError: a file is missing, truncated, overlapping or mis-sized, an index disagrees with its
                shards, or a tensor is missing, unexpected or of another shape or dtype than configured.
        """
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
        lines = [(file, hashlib.sha256(file.read_bytes()).hexdigest()) for file in described]
        lines += [(file, f"{header.size}:{header.digest}") for file, header in self._headers.items()]
        text = "".join(f"{file.relative_to(self.root).as_posix()}:{line}\n" for file, line in sorted(lines))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def sample(self) -> str:
        """SHA-256 over a sample of every safetensors file: other weights of the same shapes differ in it.

        It is for telling checkpoints apart in a moment, not for finding damage, which `verify_hashes` is for.
        """
        samples = "".join(header.sample() for _, header in sorted(self._headers.items()))
        return hashlib.sha256(samples.encode()).hexdigest()

    @property
    def _headers(self) -> dict[Path, Header]:
        return {header.file: header for one in self._catalogues.values() for header in one.files.headers}

    def listed_files(self) -> tuple[Path, ...]:
        """The files that the root's SHA256SUMS lists; none where there is no list. Raises CheckpointError."""
        return tuple(read_sums(self.root))

    def verify_hashes(self, progress: Callable[[Path], None] = lambda file: None) -> tuple[Path, ...]:
        """Hashes every file that the root's SHA256SUMS lists, calling `progress` before each; returns those files.

        Raises:
            CheckpointError: there is no list, or a file is missing or differs.
        """
        return verify_sums(self.root, progress)
