"""Recognises the two checkpoint layouts and knows where each component lies (spec/model.md 1a and 1d)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from export.checkpoint.errors import CheckpointError
from export.checkpoint.strict_json import read_object, section
from plugins.distilled import ArtifactTask

LayoutName = Literal["native", "diffusers"]
Component = Literal["denoiser", "text_encoder", "video_vae", "audio_vae"]

PartitionName = Literal["fl2va", "ref2va"]

COMPONENTS: tuple[Component, ...] = ("denoiser", "text_encoder", "video_vae", "audio_vae")
PARTITIONS: tuple[PartitionName, ...] = ("fl2va", "ref2va")
NATIVE_FOLDERS = {"fl2va": "FL2VA", "ref2va": "Ref2VA"}
DENOISER_FOLDERS = {"fl2va": "transformer", "ref2va": "transformer_ref"}
TASKS: Mapping[str, tuple[ArtifactTask, ...]] = {"fl2va": ("t2va", "fl2va"), "ref2va": ("ref2va",)}
"""What each partition was trained for."""

DIFFUSERS_STEM = "diffusion_pytorch_model"

CONTRACT = "fastvideo_inference.json"
"""The file by which a FastH3 transformer without the rest of a checkpoint is known (spec/model.md 4.5)."""


@dataclass(frozen=True)
class Place:
    """One component on disk: the directory of its config.json, that of its tensors, and their file-name stem."""

    config: Path
    tensors: Path
    stem: str


@dataclass(frozen=True)
class Tree:
    """A checkpoint directory whose layout is known. `folders` maps each partition present to the root of its parts."""

    root: Path
    layout: LayoutName
    folders: Mapping[str, Path]

    @property
    def partitions(self) -> tuple[str, ...]:
        """The partitions present, fl2va before ref2va."""
        return tuple(self.folders)

    def place(self, component: Component, partition: str) -> Place:
        """Where a component of a partition lies.

        A native Ref2VA tree may hold its transformer alone; the other components, equal in both, are then FL2VA's.
        """
        if self.layout == "diffusers":
            return _diffusers_place(self.root, component, partition)
        own = _native_place(self.folders[partition], component)
        if component == "denoiser" or own.config.is_dir():
            return own
        return _native_place(next(iter(self.folders.values())), component)

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer.json that prompts are encoded with."""
        return next(iter(self.folders.values())) / "tokenizer" / "tokenizer.json"

    @property
    def processor_files(self) -> tuple[Path, Path]:
        """The files that say how images and how videos are prepared for the vision tower."""
        folder = next(iter(self.folders.values())) / "processor"
        return folder / "preprocessor_config.json", folder / "video_preprocessor_config.json"

    def schedule_files(self, partition: str) -> tuple[Path, Path]:
        """The files that declare the sigma shifts of the video and of the audio schedule (native: one file)."""
        if self.layout == "native":
            file = self.folders[partition] / "model_index.json"
            return file, file
        video, audio = (self.root / name / "scheduler_config.json" for name in ("scheduler", "audio_scheduler"))
        return video, audio


def _diffusers_place(root: Path, component: Component, partition: str) -> Place:
    if component == "text_encoder":
        return Place(root / "text_encoder", root / "text_encoder", "model")
    folder = {"denoiser": DENOISER_FOLDERS[partition], "video_vae": "vae", "audio_vae": "audio_vae"}[component]
    return Place(root / folder, root / folder, DIFFUSERS_STEM)


def _native_place(root: Path, component: Component) -> Place:
    folder = root / ("transformer" if component == "denoiser" else component)
    return Place(folder, folder / "source" if component == "video_vae" else folder, "model")


def find_tree(root: Path) -> Tree:
    """Recognises a checkpoint directory.

    Accepted are a diffusers root (with `transformer/` or `transformer_ref/`), a native root (with `FL2VA/` or
    `Ref2VA/`), and one native partition by itself. Where a download holds both layouts side by side the diffusers one
    is taken: both describe the same model, and a partition's folder may be named to get the native one.

    Raises:
        CheckpointError: it is none of them, the tokenizer is missing, or a folder holds another partition than it says.
    """
    tree = recognise(root)
    if not tree.tokenizer_file.is_file():
        raise CheckpointError(tree.tokenizer_file, "file", "the tokenizer", "no such file")
    return tree


def recognise(root: Path) -> Tree:
    """As `find_tree`, of a directory that need hold configuration files only.

    Raises:
        CheckpointError: it is in neither layout, or a folder holds another partition than it says.
    """
    if not root.is_dir():
        raise CheckpointError(root, "checkpoint", "a directory", "no such directory")
    if (root / CONTRACT).is_file():
        command = f"h3trt adapters fuse {root} --checkpoint BASE --out DIRECTORY"
        found = f"a FastH3 transformer ({CONTRACT}), which needs its base for all else: {command}"
        raise CheckpointError(root, "layout", "a whole checkpoint", found)
    if (root / "video_vae").is_dir():
        return Tree(root, "native", {_declared_partition(root): root})
    diffusers = {name: root for name, folder in DENOISER_FOLDERS.items() if (root / folder).is_dir()}
    if diffusers:
        return Tree(root, "diffusers", diffusers)
    native = {name: root / folder for name, folder in NATIVE_FOLDERS.items() if (root / folder).is_dir()}
    if not native:
        wanted = "FL2VA/ or Ref2VA/ (native), or transformer/ (diffusers)"
        raise CheckpointError(root, "layout", wanted, sorted(path.name for path in root.iterdir())[:20])
    for name, folder in native.items():
        if _declared_partition(folder) != name:
            file = folder / "model_index.json"
            raise CheckpointError(file, "_minimax_h3.partition", repr(name), repr(_declared_partition(folder)))
    return Tree(root, "native", native)


def native_declaration(folder: Path) -> dict[str, Any]:
    """The `_minimax_h3` object of a native partition's model_index.json.

    Raises:
        CheckpointError: it is not there.
    """
    file = folder / "model_index.json"
    return section(read_object(file), "_minimax_h3", file)


def _declared_partition(folder: Path) -> str:
    declared = native_declaration(folder).get("partition")
    if declared not in PARTITIONS:
        file = folder / "model_index.json"
        raise CheckpointError(file, "_minimax_h3.partition", " or ".join(PARTITIONS), repr(declared))
    return str(declared)
