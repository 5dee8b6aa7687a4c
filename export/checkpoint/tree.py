"""Where each component lies in the two checkpoint layouts (spec/model.md 1a and 1d), and which layout a directory is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from export.checkpoint.errors import CheckpointError
from export.checkpoint.shards import read_json

LayoutName = Literal["native", "diffusers"]
Component = Literal["denoiser", "text_encoder", "video_vae", "audio_vae"]

COMPONENTS: tuple[Component, ...] = ("denoiser", "text_encoder", "video_vae", "audio_vae")
PARTITIONS = ("fl2va", "ref2va")
NATIVE_FOLDERS = {"fl2va": "FL2VA", "ref2va": "Ref2VA"}
DENOISER_FOLDERS = {"fl2va": "transformer", "ref2va": "transformer_ref"}


@dataclass(frozen=True)
class Place:
    """One component on disk: the directory of its config.json, that of its tensors, and their file-name stem."""

    config: Path
    tensors: Path
    stem: str


@dataclass(frozen=True)
class Tree:
    """A checkpoint directory whose layout is known. `folders` maps the partitions present to native partition roots."""

    root: Path
    layout: LayoutName
    folders: dict[str, Path]

    @property
    def partitions(self) -> tuple[str, ...]:
        """The partitions present, fl2va before ref2va."""
        return tuple(self.folders)

    def place(self, component: Component, partition: str) -> Place:
        """Where a component lies. A Ref2VA tree may hold only its transformer; the rest is then FL2VA's.

        Raises:
            CheckpointError: the partition is not in this checkpoint.
        """
        if partition not in self.folders:
            raise CheckpointError(self.root, "partition", f"one of {', '.join(self.folders)}", partition)
        if self.layout == "diffusers":
            return _diffusers_place(self.root, component, partition)
        own = _native_place(self.folders[partition], component)
        return own if own.config.exists() else _native_place(next(iter(self.folders.values())), component)

    def tokenizer_file(self) -> Path:
        """The tokenizer.json that prompts are encoded with.

        Raises:
            CheckpointError: it is not there.
        """
        file = next(iter(self.folders.values())) / "tokenizer" / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(file, "file", "the tokenizer", "no such file")
        return file

    def model_index(self, partition: str) -> Path:
        """The model_index.json of a partition (of the root, in the diffusers layout)."""
        return self.folders[partition] / "model_index.json"


def _diffusers_place(root: Path, component: Component, partition: str) -> Place:
    if component == "text_encoder":
        return Place(root / "text_encoder", root / "text_encoder", "model")
    folder = {"denoiser": DENOISER_FOLDERS[partition], "video_vae": "vae", "audio_vae": "audio_vae"}[component]
    return Place(root / folder, root / folder, "diffusion_pytorch_model")


def _native_place(root: Path, component: Component) -> Place:
    folder = root / ("transformer" if component == "denoiser" else component)
    return Place(folder, folder / "source" if component == "video_vae" else folder, "model")


def find_tree(root: Path) -> Tree:
    """Recognises a checkpoint directory.

    Accepted are a diffusers root (with a `transformer/` or `transformer_ref/`), a native root (with `FL2VA/` or
    `Ref2VA/`), and one native partition itself. Where a download holds both layouts side by side, the diffusers one
    is taken: both describe the same model, and a partition folder may be named to get the native one.

    Raises:
        CheckpointError: it is none of them.
    """
    if not root.is_dir():
        raise CheckpointError(root, "checkpoint", "a directory", "no such directory")
    if (root / "audio_vae" / "metadata.json").is_file() or (root / "video_vae").is_dir():
        return _single_partition(root)
    diffusers = {name: root for name, folder in DENOISER_FOLDERS.items() if (root / folder).is_dir()}
    if diffusers:
        return Tree(root, "diffusers", diffusers)
    native = {name: root / folder for name, folder in NATIVE_FOLDERS.items() if (root / folder).is_dir()}
    if native:
        return Tree(root, "native", native)
    wanted = "FL2VA/ or Ref2VA/ (native), or transformer/ (diffusers)"
    raise CheckpointError(root, "layout", wanted, sorted(path.name for path in root.iterdir())[:20])


def _single_partition(root: Path) -> Tree:
    declared = read_json(root / "model_index.json").get("_minimax_h3", {}).get("partition")
    if declared not in PARTITIONS:
        raise CheckpointError(root / "model_index.json", "_minimax_h3.partition", " or ".join(PARTITIONS), declared)
    return Tree(root, "native", {declared: root})
