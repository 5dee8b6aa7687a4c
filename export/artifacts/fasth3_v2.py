"""FastH3 8-Step V2: a whole transformer with gates of sparse attention, and the contract that it is run by.

Sources: spec/model.md 1d and 4.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.artifacts.base import Base
from export.checkpoint.catalogue import read_catalogue
from export.checkpoint.components import denoiser
from export.checkpoint.errors import CheckpointError
from export.checkpoint.shards import ComponentFiles
from export.checkpoint.strict_json import read_object
from export.checkpoint.tree import CONTRACT, DENOISER_FOLDERS, DIFFUSERS_STEM, Place
from plugins.distilled import Distilled, PinnedSchedule, VideoSparse

PROVENANCE = "provenance.json"
INDEX = "modular_model_index.json"
TRANSFORMER = DENOISER_FOLDERS["fl2va"]

RUNGS = (999, 874, 749, 624, 500, 375, 250, 125)
"""Thousandths of the base positions; 0 follows."""

VIDEO_SHIFT, AUDIO_SHIFT = 10.0, 3.0
SPARSITY, TILE = 0.8, 64

REQUIRED: Mapping[str, Any] = {
    "schema_version": "fasth3-inference-contract-v1",
    "model_id": "FastVideo/FastVideo-FastH3-8-Step-V2",
    "task": "t2av",
    "dmd_denoising_steps": list(RUNGS),
    "transformer_forwards": len(RUNGS),
    "video_scheduler_shift": VIDEO_SHIFT,
    "audio_scheduler_shift": AUDIO_SHIFT,
    "guidance_scale": 1.0,
    "attention_backend": "VIDEO_SPARSE_ATTN_H3",
    "vsa_sparsity": SPARSITY,
    "vsa_tile_size": TILE,
}
"""Every field of the contract that the computation depends on, and its only value."""

SIGMA_POINTS = len(RUNGS) + 1
"""What the contract's `num_inference_steps` counts, where it is there."""

_BASE_MODEL = re.compile(r"hf://MiniMaxAI/MiniMax-H3@([0-9A-Za-z._-]{1,100})")

DISTILLED = Distilled(
    name="fasth3-8-step-v2",
    family="fasth3_v2",
    tasks=("t2va",),
    schedule=PinnedSchedule(
        forwards=len(RUNGS),
        positions=(*(rung / 1000 for rung in RUNGS), 0.0),
        video_shift=VIDEO_SHIFT,
        audio_shift=AUDIO_SHIFT,
    ),
    video_sparse=VideoSparse(tile=TILE, sparsity=SPARSITY),
)


@dataclass(frozen=True)
class WholeStudent:
    """A student that brings its whole transformer; everything else is the base's.

    `files` holds the transformer's tensors under diffusers names, gates among them. `revision` is that of the base
    that it was trained from, from which its VAEs are to be taken.
    """

    path: Path
    distilled: Distilled
    config: denoiser.DenoiserConfig
    files: ComponentFiles
    revision: str


def is_fasth3_v2(root: Path) -> bool:
    """Whether a directory is such a release; a damaged one too, so that its fault is told."""
    return (root / CONTRACT).exists()


def read_fasth3_v2(root: Path) -> WholeStudent:
    """Reads a release's contract, provenance, configuration and headers; no tensor data.

    Raises:
        CheckpointError: a field of the contract is absent or other than published, the scheduler files disagree, the
            base is not pinned, or a tensor is missing, unexpected or of another shape or dtype.
    """
    if not (root / INDEX).is_file():
        raise CheckpointError(root / INDEX, "file", "the index that FastVideo's releases have", "no such file")
    _check_contract(root / CONTRACT)
    for folder, shift in (("scheduler", VIDEO_SHIFT), ("audio_scheduler", AUDIO_SHIFT)):
        _check_scheduler(root / folder / "scheduler_config.json", shift)
    revision = _revision(root / PROVENANCE)
    place = root / TRANSFORMER
    read = read_catalogue("denoiser", "diffusers", Place(place, place, DIFFUSERS_STEM), gates=True)
    config = denoiser.DenoiserConfig.model_validate(read.arguments)
    return WholeStudent(root, DISTILLED, config, read.files, revision)


def check_sizes(student: WholeStudent, base: Base) -> None:
    """Sees that a transformer is of the base's sizes, so that its VAEs and text encoder fit. Raises CheckpointError."""
    theirs, ours = student.config.model_dump(), base.config.model_dump()
    for key, value in theirs.items():
        if value != ours[key]:
            file = student.path / TRANSFORMER / "config.json"
            raise CheckpointError(file, key, f"{ours[key]}, as the base has", value)


def _check_contract(file: Path) -> None:
    contract = read_object(file)
    for key, wanted in REQUIRED.items():
        _check(file, contract, key, wanted)
    if "num_inference_steps" in contract:
        _check(file, contract, "num_inference_steps", SIGMA_POINTS)


def _check(file: Path, values: Mapping[str, Any], key: str, wanted: Any) -> None:
    found = values.get(key)
    # A bool equals a number in Python, and 8.0 equals 8, which some writers put for it.
    if isinstance(found, bool) or found != wanted:
        raise CheckpointError(file, key, repr(wanted), "nothing" if found is None else repr(found)[:120])


def _check_scheduler(file: Path, shift: float) -> None:
    if file.is_file():
        _check(file, read_object(file), "shift", shift)


def _revision(file: Path) -> str:
    """The revision of the base that the provenance names. Raises CheckpointError."""
    named = read_object(file).get("base_model")
    match = _BASE_MODEL.fullmatch(named) if isinstance(named, str) else None
    if match is None:
        raise CheckpointError(file, "base_model", "hf://MiniMaxAI/MiniMax-H3@REVISION", repr(named)[:120])
    return match[1]
