"""FastH3 v1: FastVideo's 4-step student of MiniMax-H3, as an adapter that is fused for good (spec/model.md 8.1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from export.artifacts import metadata
from export.artifacts.artifact import Artifact, Patch
from export.artifacts.base import Base
from export.artifacts.pieces import Pairing, Pieces, Role, check_touched, take_apart
from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Stored
from export.checkpoint.safetensors_file import Declared, Header
from export.checkpoint.strict_json import read_object
from plugins.distilled import Distilled, PinnedSchedule, VideoSparse

FORMAT = "fastvideo-lora-v2"
FILE = "adapter_model.safetensors"
MANIFEST = "adapter_manifest.json"
BASE_MODEL = "MiniMaxAI/MiniMax-H3"
RANK = 64
VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
RUNGS = (999, 749, 500, 250)
"""Thousandths of the base positions that it was distilled at; 0 follows."""

SPARSITY = 0.9
"""Of the variants that have gates."""

ROLES: Mapping[str, Role] = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".diff": "difference",
    ".diff_b": "bias_difference",
    ".set_weight": "injected",
}

_COUNTED: Mapping[str, tuple[Role, ...]] = {
    "low_rank_tensors": ("down", "up"),
    "diff_tensors": ("difference", "bias_difference"),
    "set_weight_tensors": ("injected",),
}
"""What the file says of itself -> the tensors that must be as many."""

_FUSED = (".attn.to_q", ".attn.to_k", ".attn.to_v", ".ff.net.0.proj")
"""Modules that the base's own files hold fused with others: no full difference exists for them."""


def read_fasth3(header: Header, base: Base) -> Artifact:
    """The adapter of a file in FastVideo's format, dense or for sparse video attention.

    Raises:
        CheckpointError: the file is renamed, is of another model or another number of steps, does not hold what it
            says, has a pair that is incomplete or of another rank, or leaves a block untouched.
    """
    if header.file.name != FILE:
        raise CheckpointError(header.file, "file name", f"{FILE}, as it is published", header.file.name)
    name = _name(header)
    metadata.require_count(header, "rank", RANK, "the rank of FastH3 adapters")
    metadata.refuse_orders(header)
    modules = take_apart(header, ROLES)
    _check_counts(header, modules)
    reader = _Reader(header.file, base)
    patches: dict[str, Patch] = {}
    for module, pieces in modules.items():
        patches |= reader.patches(module, pieces)
    check_touched(header.file, patches, base)
    sparse = _sparse(header, name, patches, base)
    _check_manifest(header.file)
    return Artifact(header.file, distilled(name, sparse), patches, header.metadata)


class _Reader:
    """Makes patches of pieces."""

    def __init__(self, file: Path, base: Base) -> None:
        self._file = file
        self._base = base
        self._pairing = Pairing(file, RANK, 1.0)  # the format has no alpha

    def patches(self, module: str, pieces: Pieces) -> dict[str, Patch]:
        """Those of a module's weight and bias. Raises CheckpointError."""
        weight, bias = f"{module}.weight", f"{module}.bias"
        if "injected" in pieces:
            return {weight: self._injected(weight, pieces)}
        found: dict[str, Patch] = {}
        if set(pieces) != {"bias_difference"}:
            found[weight] = self._weight(module, pieces)
        if "bias_difference" in pieces:
            found[bias] = Patch(difference=self._difference(pieces["bias_difference"], self._declared(bias, pieces)))
        return found

    def _weight(self, module: str, pieces: Pieces) -> Patch:
        declared = self._declared(f"{module}.weight", pieces)
        difference = pieces.get("difference")
        if difference is not None and module.endswith(_FUSED):
            raise CheckpointError(self._file, difference.key, "no full difference of a fused projection", "one")
        added = None if difference is None else self._difference(difference, declared)
        if {"down", "up"}.isdisjoint(pieces):
            return Patch(difference=added)
        return Patch(self._pairing.low_rank(module, pieces, declared.shape or ()), added)

    def _injected(self, name: str, pieces: Pieces) -> Patch:
        stored = pieces["injected"]
        declared = self._base.gates.get(name)
        if declared is None:
            fault = "one that the base has" if name in self._base.parameters else "an unknown one"
            raise CheckpointError(self._file, stored.key, "the gate of a block, which the base has not", fault)
        if len(pieces) > 1:
            other = next(piece.key for role, piece in pieces.items() if role != "injected")
            raise CheckpointError(self._file, other, "nothing more for a parameter that is set whole", "a change of it")
        return Patch(injected=self._difference(stored, declared))

    def _declared(self, name: str, pieces: Pieces) -> Declared:
        if name not in self._base.parameters:
            key = next(iter(pieces.values())).key
            raise CheckpointError(self._file, key, "a parameter of the transformer", f"{name}, which it has not")
        return self._base.parameters[name]

    def _difference(self, stored: Stored, declared: Declared) -> Stored:
        if stored.shape != declared.shape:
            raise CheckpointError(self._file, stored.key, list(declared.shape or ()), list(stored.shape))
        return stored


def _name(header: Header) -> str:
    """What requests call the adapter: the student's name, without owner, revision and "FastVideo-"."""
    metadata.require(header, "format", FORMAT)
    rule = "a FastH3 student of FastVideo, as fastvideo/...fasth3..."
    student = metadata.take(header, "finetuned_model", rule)
    plain = re.split(r"[@:]", student.lower())[0]
    if not plain.startswith("fastvideo/") or "fasth3" not in plain:
        raise CheckpointError(header.file, "__metadata__.finetuned_model", rule, repr(student)[:120])
    steps = re.search(r"([0-9]+)-step", plain)
    if steps and steps[1] != str(len(RUNGS)):
        wanted = f"a student of {len(RUNGS)} steps"
        raise CheckpointError(header.file, "__metadata__.finetuned_model", wanted, repr(student)[:120])
    original = header.metadata.get("base_model", BASE_MODEL)
    if original.casefold() != BASE_MODEL.casefold():
        raise CheckpointError(header.file, "__metadata__.base_model", BASE_MODEL, repr(original)[:120])
    short = re.sub(r"[^a-z0-9._-]", "-", plain.removeprefix("fastvideo/").removeprefix("fastvideo-"))
    return short.lstrip("._-")[:64]


def _check_counts(header: Header, modules: Mapping[str, Pieces]) -> None:
    roles = [role for pieces in modules.values() for role in pieces]
    for key, counted in _COUNTED.items():
        found = sum(role in counted for role in roles)
        metadata.require_count(header, key, found, "as many as the file holds")


def _sparse(header: Header, name: str, patches: Mapping[str, Patch], base: Base) -> VideoSparse | None:
    """Sparse attention of a file that has gates; then every block has one, and its name does not say otherwise."""
    gates = [parameter for parameter, patch in patches.items() if patch.injected is not None]
    missing = sorted(set(base.gates) - set(gates))
    if gates and missing:
        wanted = f"a gate for each of {len(base.gates)} blocks, or none"
        raise CheckpointError(header.file, missing[0], wanted, f"{len(gates)} gates, none of this block")
    for word, fits in (("dense", not gates), ("vsa", bool(gates))):
        if word in name and not fits:
            wanted = f"{'no gates' if gates else 'gates'} in an adapter of this name"
            found = f"{name} with {len(gates)} gates"
            raise CheckpointError(header.file, "__metadata__.finetuned_model", wanted, found)
    return VideoSparse(sparsity=SPARSITY) if gates else None


def _check_manifest(file: Path) -> None:
    """Sees that the bundle that the file came in, if it lies in one and says so, is of the same schedule."""
    folder = file.absolute().parent
    for manifest in (folder / MANIFEST, folder.parent / MANIFEST):
        sampling = read_object(manifest).get("sampling") if manifest.is_file() else None
        rungs = sampling.get("base_timesteps") if isinstance(sampling, dict) else None
        if rungs not in (None, list(RUNGS)):
            raise CheckpointError(manifest, "sampling.base_timesteps", list(RUNGS), repr(rungs)[:120])


def distilled(name: str, sparse: VideoSparse | None) -> Distilled:
    """What requests to a variant are bound to."""
    positions = (*(rung / 1000 for rung in RUNGS), 0.0)
    schedule = PinnedSchedule(
        forwards=len(RUNGS),
        positions=positions,
        video_shift=VIDEO_SHIFT,
        audio_shift=AUDIO_SHIFT,
    )
    return Distilled(name=name, family="fasth3_v1", tasks=("t2va",), schedule=schedule, video_sparse=sparse)
