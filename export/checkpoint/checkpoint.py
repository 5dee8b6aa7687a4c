"""A checkpoint on disk, whichever of the two layouts it has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from export.checkpoint.catalogue import Catalogue, read_catalogue
from export.checkpoint.components import audio_vae, denoiser, text_encoder, video_vae
from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.hashes import verify_sums
from export.checkpoint.recipes import QKVLayout
from export.checkpoint.shards import read_json
from export.checkpoint.tree import COMPONENTS, Component, LayoutName, Tree, find_tree
from plugins.dimensions import Dimensions


class Checkpoint:
    """Configuration and lazy weights of every component. Use `Checkpoint.open`; no tensor data is read by this class.

    Attributes: `root`, `layout` ("native" or "diffusers"), `partitions` (of "fl2va", "ref2va", those present).
    """

    root: Path
    layout: LayoutName
    partitions: tuple[str, ...]

    def __init__(self, tree: Tree, catalogues: Mapping[tuple[Component, str], Catalogue]) -> None:
        self._tree = tree
        self._catalogues = catalogues
        self.root = tree.root
        self.layout = tree.layout
        self.partitions = tree.partitions

    @staticmethod
    def open(path: Path | str) -> Checkpoint:
        """Recognises the layout, reads every configuration file and safetensors header, and checks them.

        Raises:
            CheckpointError: a file is missing, truncated, overlapping or mis-sized, an index disagrees with its
                shards, or a tensor is missing, unexpected or of another shape or dtype than configured.
        """
        tree = find_tree(Path(path))
        tree.tokenizer_file()
        catalogues: dict[tuple[Component, str], Catalogue] = {}
        places: dict[Any, Catalogue] = {}
        for partition in tree.partitions:
            for component in COMPONENTS:
                place = tree.place(component, partition)
                if place not in places:
                    places[place] = read_catalogue(component, tree.layout, place)
                catalogues[component, partition] = places[place]
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
        return self._tree.tokenizer_file()

    @cached_property
    def dimensions(self) -> Dimensions:
        """Every size that later layers read; all partitions have the same.

        Raises:
            CheckpointError: partitions differ in architecture, or sizes do not fit together.
        """
        first = self._partition_dimensions(self.partitions[0])
        for partition in self.partitions[1:]:
            other = self._partition_dimensions(partition)
            if other != first:
                file = self.catalogue("denoiser", partition).config_files[0]
                raise CheckpointError(file, "configuration", f"the sizes of {self.partitions[0]}", f"those of {other}")
        return first

    def _partition_dimensions(self, partition: str) -> Dimensions:
        def config(component: Component) -> Any:
            return self.catalogue(component, partition).config

        video_shift, audio_shift = self._shifts(partition)
        text = config("text_encoder")
        sizes = Dimensions(
            denoiser=denoiser.dimensions(config("denoiser")),
            text_encoder=text_encoder.dimensions(text, self.catalogue("text_encoder", partition).config_files[0]),
            video_vae=video_vae.dimensions(config("video_vae")),
            audio_vae=audio_vae.dimensions(config("audio_vae")),
            video_shift=video_shift,
            audio_shift=audio_shift,
        )
        self._check_joints(sizes, partition)
        return sizes

    def _check_joints(self, sizes: Dimensions, partition: str) -> None:
        joints = {
            "text_dim": (sizes.denoiser.text_dim, sizes.text_encoder.hidden, "text encoder's hidden_size"),
            "in_channels": (sizes.denoiser.video_channels, sizes.video_vae.latent_channels, "video VAE's latents"),
            "audio_in_channels": (sizes.denoiser.audio_channels, sizes.audio_vae.latent_channels, "audio VAE's latents"),
        }
        for key, (found, wanted, owner) in joints.items():
            if found != wanted:
                file = self.catalogue("denoiser", partition).config_files[0]
                raise CheckpointError(file, key, f"{wanted}, the {owner}", found)

    def _shifts(self, partition: str) -> tuple[float, float]:
        """Sigma shifts of the video and audio schedules."""
        if self.layout == "native":
            file = self._tree.model_index(partition)
            shifts = read_json(file).get("_minimax_h3", {}).get("sigma_shift_scales", {})
            return _shift(file, "video", shifts), _shift(file, "audio", shifts)
        video, audio = (self.root / name / "scheduler_config.json" for name in ("scheduler", "audio_scheduler"))
        return _shift(video, "shift", read_json(video)), _shift(audio, "shift", read_json(audio))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over configurations, tokenizer.json and the header and size of every safetensors file (no data)."""
        digest = hashlib.sha256()
        for file in self._described_files():
            digest.update(f"{file.relative_to(self.root)}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
        headers = {header.file: header for one in self._catalogues.values() for header in one.files.headers}
        for file in sorted(headers):
            name, header = file.relative_to(self.root), headers[file]
            digest.update(f"{name}:{header.size}:{header.digest}\n".encode())
        return digest.hexdigest()

    def _described_files(self) -> list[Path]:
        files = {file for one in self._catalogues.values() for file in one.config_files} | {self.tokenizer_file}
        if self.layout == "native":
            files |= {self._tree.model_index(partition) for partition in self.partitions}
        else:
            files |= {self.root / name / "scheduler_config.json" for name in ("scheduler", "audio_scheduler")}
        return sorted(files)

    def verify_hashes(self, progress: Callable[[Path], None] = lambda file: None) -> tuple[Path, ...]:
        """Hashes every file that the root's SHA256SUMS lists, calling `progress` before each; returns those files.

        Raises:
            CheckpointError: there is no list, or a file is missing or differs.
        """
        return verify_sums(self.root, progress)


def _shift(file: Path, key: str, values: Mapping[str, Any]) -> float:
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(file, key, "a positive sigma shift", repr(value))
    return float(value)
