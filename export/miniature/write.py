"""Writes whole checkpoint trees in either layout, with drawn weights or as sparse files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from export.checkpoint.components import audio_vae, denoiser, text_encoder, video_vae
from export.checkpoint.hashes import write_sums
from export.checkpoint.recipes import native_declarations, to_native
from export.checkpoint.safetensors_file import Declared
from export.checkpoint.tree import DENOISER_FOLDERS, NATIVE_FOLDERS, PARTITIONS, TASKS, LayoutName
from export.miniature import processor, sizes, values
from export.miniature.artifacts import write_artifacts
from export.miniature.draw import Draw
from export.miniature.files import Content, diffusers_config, write_component, write_json
from export.miniature.tokenizer import TokenizerFiles, train

VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0


@dataclass(frozen=True)
class Writer:
    """Writes the components of one model. `seed` None leaves the data out: sparse files of the same sizes."""

    sizes: sizes.Sizes
    tokenizer: TokenizerFiles
    layout: LayoutName
    seed: int | None

    def denoiser(self, directory: Path, partition: str) -> None:
        """Transformer of one partition; the partitions differ in their weights only."""
        config = self.sizes.denoiser
        declared = denoiser.tensors(config)
        drawn = self._draw(partition, lambda draw: values.denoiser_values(config, draw))
        if self.layout == "diffusers":
            arguments = config.model_dump(mode="json")
            write_json(directory / "config.json", diffusers_config("MiniMaxH3Transformer3DModel", arguments))
            shards = self.sizes.shards.denoiser_diffusers
            write_component(directory, "diffusion_pytorch_model", shards, Content(declared, drawn))
            return
        write_json(directory / "config.json", denoiser.to_native(config))
        recipes = denoiser.recipes(config)
        if drawn is not None:
            drawn = to_native(drawn, recipes)
            count = config.rope_freq_dim
            drawn["rope.inv_freq"] = torch.tensor([config.rope_theta ** (-step / count) for step in range(count)])
        native = native_declarations(declared, recipes) | denoiser.native_only(config)
        write_component(directory, "model", self.sizes.shards.denoiser_native, Content(native, drawn))

    def text_encoder(self, directory: Path) -> None:
        """The text encoder, with the tokenizer files that the release keeps beside it."""
        config = self.sizes.text_encoder
        drawn = self._draw("text_encoder", lambda draw: values.text_encoder_values(config, draw))
        head = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "dtype": "bfloat16"}
        write_json(directory / "config.json", head | config.model_dump(mode="json"))
        content = Content(text_encoder.tensors(config), drawn)
        write_component(directory, "model", self.sizes.shards.text_encoder, content)

    def video_vae(self, directory: Path) -> None:
        """The video VAE."""
        config = self.sizes.video_vae
        declared = video_vae.tensors(config)
        drawn = self._draw("video_vae", lambda draw: values.video_vae_values(config, draw))
        if self.layout == "diffusers":
            arguments = config.model_dump(mode="json")
            write_json(directory / "config.json", diffusers_config("AutoencoderKLMiniMaxH3", arguments))
            shards = self.sizes.shards.video_vae_diffusers
            write_component(directory, "diffusion_pytorch_model", shards, Content(declared, drawn))
            return
        outer, source = video_vae.to_native(config)
        write_json(directory / "config.json", outer)
        write_json(directory / "source" / "config.json", source)
        recipes = video_vae.recipes(config)
        width = config.decoder_num_attention_heads * config.decoder_attention_head_dim
        mask = Declared((1, 1, width), torch.float32)
        if drawn is not None:
            drawn = to_native(drawn, recipes) | {"decoder.mask_token": torch.zeros(1, 1, width)}
        native = native_declarations(declared, recipes) | {"decoder.mask_token": mask}
        write_component(directory / "source", "model", 1, Content(native, drawn))

    def audio_vae(self, directory: Path) -> None:
        """The audio VAE."""
        config = self.sizes.audio_vae
        drawn = self._draw("audio_vae", lambda draw: values.audio_vae_values(config, draw))
        content = Content(audio_vae.tensors(config), drawn)
        if self.layout == "diffusers":
            arguments = config.model_dump(mode="json")
            write_json(directory / "config.json", diffusers_config("AutoencoderKLMiniMaxH3Audio", arguments))
            write_component(directory, "diffusion_pytorch_model", 1, content)
            return
        outer, metadata, yaml = audio_vae.to_native(config)
        write_json(directory / "config.json", outer)
        write_json(directory / "metadata.json", metadata)
        (directory / "config.yaml").write_text(yaml, encoding="utf-8")
        write_component(directory, "model", 1, content)

    def texts(self, root: Path) -> None:
        """`tokenizer/` and `processor/`."""
        _write_texts(root / "tokenizer", self.tokenizer.files())
        _write_texts(root / "processor", self.tokenizer.files() | processor.files())

    def _draw(self, scope: str, make: Callable[[Draw], values.Values]) -> values.Values | None:
        return None if self.seed is None else make(Draw(self.seed, scope))


ARTIFACTS = "artifacts"
"""Folder of a checkpoint that is written with artifacts."""


def write_miniature(directory: Path | str, layout: LayoutName, seed: int, artifacts: bool = False) -> None:
    """Writes the miniature checkpoint, with both partitions, into a new or empty directory.

    artifacts: few-step artifacts of every family as well, in the places that `export.miniature.FOLDERS` names.

    Equal seeds give equal bytes, and the two layouts of one seed hold the same model.

    Raises:
        FileExistsError: the directory is not empty.
        ValueError: there is no such layout.
    """
    tokenizer = train()
    vocab = len(tokenizer.vocab) + len(tokenizer.special_ids)
    tiny = sizes.miniature(tokenizer.special_ids, vocab + -vocab % 64)
    with _staged(Path(directory)) as root:
        _write_tree(root, Writer(tiny, tokenizer, layout, seed))
        if artifacts:
            write_artifacts(root / ARTIFACTS, tiny.denoiser, seed)
        write_sums(root, [file for file in root.rglob("*") if file.is_file()])


def write_sparse_released(directory: Path | str, layout: LayoutName, artifacts: bool = False) -> None:
    """Writes the released dimensions into a new or empty directory, as sparse files whose data reads as zeros.

    The tokenizer is the miniature's. artifacts: as for `write_miniature`.

    Raises:
        FileExistsError: the directory is not empty.
        ValueError: there is no such layout.
    """
    tokenizer = train()
    with _staged(Path(directory)) as root:
        released = sizes.released(tokenizer.special_ids)
        _write_tree(root, Writer(released, tokenizer, layout, None))
        if artifacts:
            write_artifacts(root / ARTIFACTS, released.denoiser, None)


@contextmanager
def _staged(directory: Path) -> Iterator[Path]:
    """A scratch directory that becomes `directory` when all is written, and vanishes when anything fails."""
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory}: not empty; a checkpoint is written into a new or empty directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        root = Path(scratch) / "checkpoint"
        root.mkdir()
        yield root
        root.replace(directory)


def _write_tree(root: Path, writer: Writer) -> None:
    if writer.layout == "diffusers":
        _write_diffusers(root, writer)
    elif writer.layout == "native":
        _write_native(root, writer)
    else:
        raise ValueError(f"layout: expected native or diffusers, found {writer.layout!r}")


def _write_native(root: Path, writer: Writer) -> None:
    for partition in PARTITIONS:
        folder = root / NATIVE_FOLDERS[partition]
        writer.denoiser(folder / "transformer", partition)
        writer.text_encoder(folder / "text_encoder")
        _write_texts(folder / "text_encoder", writer.tokenizer.files())
        writer.video_vae(folder / "video_vae")
        writer.audio_vae(folder / "audio_vae")
        writer.texts(folder)
        write_json(folder / "model_index.json", _native_index(partition))


def _write_diffusers(root: Path, writer: Writer) -> None:
    for partition in PARTITIONS:
        writer.denoiser(root / DENOISER_FOLDERS[partition], partition)
    writer.text_encoder(root / "text_encoder")
    writer.video_vae(root / "vae")
    writer.audio_vae(root / "audio_vae")
    writer.texts(root)
    for folder, shift in (("scheduler", VIDEO_SHIFT), ("audio_scheduler", AUDIO_SHIFT)):
        write_json(root / folder / "scheduler_config.json", diffusers_config("MiniMaxH3Scheduler", {"shift": shift}))
    for name in ("model_index.json", "modular_model_index.json"):
        write_json(root / name, _modular_index())


def _native_index(partition: str) -> dict[str, Any]:
    return {
        "_class_name": "MiniMaxH3Pipeline",
        "_diffusers_version": "0.32.2",
        "text_encoder": ["transformers", "MiniMaxH3Qwen3VLHFEncoder"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "video_vae": ["diffusers", "MiniMaxH3VideoVAE"],
        "audio_vae": ["diffusers", "MiniMaxH3AudioVAE"],
        "scheduler": None,
        "transformer": ["diffusers", "MiniMaxH3DiTModel"],
        "processor": ["transformers", "Qwen3VLProcessor"],
        "_minimax_h3": {
            "schema_version": 1,
            "partition": partition,
            "tasks": list(TASKS[partition]),
            "task_aliases": {},
            "sigma_shift_scales": {"video": VIDEO_SHIFT, "audio": AUDIO_SHIFT},
        },
    }


def _modular_index() -> dict[str, Any]:
    components = {
        "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
        "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
        "processor": ("transformers", "Qwen3VLProcessor"),
        "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
        "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
        "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
        "transformer_ref": ("diffusers", "MiniMaxH3Transformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
    }
    index: dict[str, Any] = {
        "_blocks_class_name": "MiniMaxH3Blocks",
        "_class_name": "MiniMaxH3ModularPipeline",
        "_diffusers_version": "0.42.1",
    }
    for name, kind in components.items():
        source = {"pretrained_model_name_or_path": None, "subfolder": name, "variant": None, "revision": None}
        index[name] = [*kind, {"type_hint": list(kind), **source}]
    return index


def _write_texts(directory: Path, files: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        (directory / name).write_text(contents, encoding="utf-8")
