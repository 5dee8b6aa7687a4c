"""Writes artifacts of every family, with the names and metadata of the published ones, for a model of any size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from export.artifacts import fasth3, fasth3_v2, flashgen, turbo
from export.artifacts.base import Base
from export.artifacts.pieces import PEFT_ROLES
from export.checkpoint.components import denoiser
from export.checkpoint.recipes import native_declarations
from export.checkpoint.safetensors_file import Declared, write_sparse, write_tensors
from export.checkpoint.tree import CONTRACT, DIFFUSERS_STEM
from export.miniature import values
from export.miniature.draw import Draw
from export.miniature.files import Content, diffusers_config, write_component, write_json

FOLDERS: Mapping[str, str] = {
    "fasth3_v1": "FastVideo-FastH3-4-step-Preview-v1-LoRA",
    "fasth3_v1_dense": "FastVideo-FastH3-4-step-Preview-v1-LoRA/dense-datafree",
    "fasth3_v1_vsa": "FastVideo-FastH3-4-step-Preview-v1-LoRA/vsa-datafree",
    "fasth3_v2": "FastVideo-FastH3-8-Step-V2",
    "turbo_4step": "Minimax-h3-Turbo/minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16.safetensors",
    "turbo_8step": "Minimax-h3-Turbo/minimax_h3_fl2v_turbo_8step_v1.0_bf16.safetensors",
    "turbo_ref2v": "Minimax-h3-Turbo/minimax_h3_ref2v_turbo_4step_v0.1_bf16.safetensors",
    "flashgen": f"Minimax-H3-4step-lora-flashgen/{flashgen.FILE}",
}
"""Where each artifact lies below the folder that `write_artifacts` fills; `fasth3_v1` is the bundle of its variants."""

LINEAR_GAIN, ADALN_GAIN, ADDED = 0.25, 0.1, 0.05
"""Sizes of changes: of linears and of AdaLN in units of 1/sqrt(inputs), and of what is added to norms and biases.

Each is a fraction of what it changes: clips differ visibly, and stay clips.
"""

NORMS = 19
"""Norms that FastH3 changes, of all: the release's 85 differences are these, 16 outside blocks, and 50 AdaLN biases."""

_DOWN, _UP = PEFT_ROLES
_OUTSIDE = ("proj_in", "audio_proj_in", "context_embedder", "time_embedder.linear_1", "time_embedder.linear_2")
_HEADS = ("norm_out.linear", "proj_out", "audio_proj_out")


@dataclass(frozen=True)
class Piece:
    """A tensor of an artifact: its shape, and how large its values are."""

    shape: tuple[int, ...]
    std: float


Pieces = dict[str, Piece]


def write_artifacts(directory: Path, config: denoiser.DenoiserConfig, seed: int | None) -> None:
    """Writes one artifact of each family, and FastH3 v1 in both variants, in the places that `FOLDERS` names.

    seed: equal seeds give equal bytes; None leaves the data out: sparse files of the same sizes.
    """
    writer = _Writer(directory, Base(config, fasth3.VIDEO_SHIFT, fasth3.AUDIO_SHIFT), seed)
    writer.fasth3()
    writer.fasth3_v2()
    writer.turbo("turbo_4step", {"key_format": turbo.KEY_FORMAT, "alpha": "128"})
    # Those of other resolutions say nothing of their format.
    writer.turbo("turbo_8step", {"alpha": "8"})
    writer.turbo("turbo_ref2v", {"alpha": "8"})
    writer.flashgen()


@dataclass(frozen=True)
class _Writer:
    directory: Path
    base: Base
    seed: int | None

    def fasth3(self) -> None:
        root = self.directory / FOLDERS["fasth3_v1"]
        write_json(root / fasth3.MANIFEST, {"sampling": {"base_timesteps": list(fasth3.RUNGS)}})
        changes = self._fasth3_pairs() | self._fasth3_differences()
        gates = {
            f"{name.removesuffix('.weight')}.set_weight": Piece(declared.shape or (), _gate_std(declared))
            for name, declared in self.base.gates.items()
        }
        self._write("fasth3_v1_dense", changes, self._fasth3_metadata(changes, "Dense"))
        self._write("fasth3_v1_vsa", changes | gates, self._fasth3_metadata(changes | gates, "VSA"))

    def _fasth3_pairs(self) -> Pieces:
        adaln = [module for module in self.base.adaln_linears if module.startswith("transformer_blocks.")]
        pieces: Pieces = {}
        for module in (*self.base.block_linears, *adaln):
            gain = ADALN_GAIN if module in adaln else LINEAR_GAIN
            names = (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
            pieces |= _pair(names, self._shape(f"{module}.weight"), fasth3.RANK, 1.0, gain)
        return pieces

    def _fasth3_differences(self) -> Pieces:
        endings = ("norm.weight", "norm1.weight", "norm2.weight")
        norms = [name for name in self.base.parameters if name.endswith(endings)]
        outside = [f"{module}.{kind}" for module in (*_OUTSIDE, *_HEADS) for kind in ("weight", "bias")]
        biases = [name for name in self.base.parameters if name.endswith("adaln_proj.linear.bias")]
        pieces = {}
        for name in (*outside, *biases, *norms[:NORMS]):
            module, _, kind = name.rpartition(".")
            shape = self._shape(name)
            std = ADDED * (shape[1] ** -0.5 if len(shape) == 2 else 1.0)
            pieces[f"{module}.{'diff_b' if kind == 'bias' else 'diff'}"] = Piece(shape, std)
        return pieces

    def _fasth3_metadata(self, pieces: Pieces, variant: str) -> dict[str, str]:
        student = f"FastVideo/FastVideo-FastH3-4-step-Preview-v1-{variant}-DataFree"
        counts = {
            key: str(sum(name.endswith(endings) for name in pieces))
            for key, endings in (
                ("low_rank_tensors", (".lora_A.weight", ".lora_B.weight")),
                ("diff_tensors", (".diff", ".diff_b")),
                ("set_weight_tensors", (".set_weight",)),
            )
        }
        about = {"format": fasth3.FORMAT, "base_model": fasth3.BASE_MODEL, "finetuned_model": student}
        return {**about, "rank": str(fasth3.RANK), **counts}

    def fasth3_v2(self) -> None:
        root = self.directory / FOLDERS["fasth3_v2"]
        write_json(root / fasth3_v2.INDEX, {"_class_name": "MiniMaxH3ModularPipeline"})
        write_json(root / CONTRACT, {**fasth3_v2.REQUIRED, "num_inference_steps": fasth3_v2.SIGMA_POINTS})
        write_json(root / fasth3_v2.PROVENANCE, {"base_model": f"hf://{fasth3.BASE_MODEL}@{'0' * 40}"})
        shifts = {"scheduler": fasth3_v2.VIDEO_SHIFT, "audio_scheduler": fasth3_v2.AUDIO_SHIFT}
        for folder, shift in shifts.items():
            scheduler = diffusers_config("MiniMaxH3Scheduler", {"shift": shift})
            write_json(root / folder / "scheduler_config.json", scheduler)
        place, config = root / fasth3_v2.TRANSFORMER, self.base.config
        arguments = config.model_dump(mode="json")
        write_json(place / "config.json", diffusers_config("MiniMaxH3Transformer3DModel", arguments))
        declared = denoiser.tensors(config, gates=True)
        write_component(place, DIFFUSERS_STEM, 2, Content(declared, self._student()))

    def _student(self) -> dict[str, torch.Tensor] | None:
        if self.seed is None:
            return None
        draw = Draw(self.seed, "fasth3_v2")
        gates = {
            name: draw.normal(name, declared.shape or (), _gate_std(declared)).to(declared.dtype)
            for name, declared in self.base.gates.items()
        }
        return values.denoiser_values(self.base.config, draw) | gates

    def turbo(self, name: str, metadata: Mapping[str, str]) -> None:
        scale = float(metadata["alpha"]) / turbo.RANK
        pieces: Pieces = {}
        for module in self.base.block_linears:
            names = (module + _DOWN, module + _UP)
            pieces |= _pair(names, self._shape(f"{module}.weight"), turbo.RANK, scale, LINEAR_GAIN)
        self._write(name, pieces, metadata)

    def flashgen(self) -> None:
        modules = (*self.base.block_linears, *self.base.adaln_linears)
        recipes = denoiser.recipes(self.base.config)
        changed = {f"{module}.weight": recipes[f"{module}.weight"] for module in modules}
        native = native_declarations(self.base.parameters, changed)
        pieces: Pieces = {}
        for key, declared in native.items():
            module = flashgen.PREFIX + key.removesuffix(".weight")
            gain = ADALN_GAIN if "adaln" in module else LINEAR_GAIN
            pieces |= _pair((module + _DOWN, module + _UP), declared.shape or (), flashgen.RANK, 1.0, gain)
        schedule = {"tasks": "t2va", "base_schedule": "1.0,0.7,0.4,0.15,0.0"}
        ranks = {"lora_rank": str(flashgen.RANK), "lora_alpha": str(flashgen.ALPHA)}
        layout = {"key_format": flashgen.KEY_FORMAT, "qkv_layout": flashgen.QKV_LAYOUT}
        self._write("flashgen", pieces, {"format": "pt", **layout, **ranks, **schedule})

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.base.parameters[name].shape or ()

    def _write(self, name: str, pieces: Pieces, metadata: Mapping[str, str]) -> None:
        file = self.directory / FOLDERS[name]
        if file.suffix != ".safetensors":
            file = file / fasth3.FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        if self.seed is None:
            declared = {key: Declared(piece.shape, torch.bfloat16) for key, piece in pieces.items()}
            write_sparse(file, declared, metadata)
            return
        draw = Draw(self.seed, name)
        drawn = {key: draw.normal(key, one.shape, one.std).to(torch.bfloat16) for key, one in pieces.items()}
        write_tensors(file, drawn, metadata)


def _pair(names: tuple[str, str], shape: tuple[int, ...], rank: int, scale: float, gain: float) -> Pieces:
    """A and B whose product, scaled, has values of `gain` / sqrt(inputs)."""
    outputs, inputs = shape
    down = Piece((rank, inputs), inputs**-0.5)
    return {names[0]: down, names[1]: Piece((outputs, rank), gain / (scale * math.sqrt(rank)))}


def _gate_std(declared: Declared) -> float:
    """Of gates of about one half, of rows that a norm has made of about one."""
    return 0.5 * (declared.shape or (1, 1))[1] ** -0.5
