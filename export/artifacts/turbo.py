"""Turbo: LightX2V's adapters for 4 and 8 steps, which requests switch between (spec/model.md 8.4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from export.artifacts import metadata
from export.artifacts.artifact import Artifact, Patch
from export.artifacts.base import RELEASED, Base
from export.artifacts.pieces import PEFT_ROLES, Pairing, check_modules, take_apart
from export.checkpoint.errors import CheckpointError
from export.checkpoint.safetensors_file import Header
from plugins.distilled import ArtifactTask, Distilled, PinnedSchedule

KEY_FORMAT = "minimax-h3-diffusers"
RANK = 128
STEPS = (4, 8)
VIDEO_SHIFT_768P = 6.0

_NAME = re.compile(
    r"minimax_h3_((fl2v|ref2v)_turbo_([0-9]{1,3})step_v[0-9]{1,3}\.[0-9]{1,3}(_768p)?)(_bf16)?\.safetensors"
)
NAMES = "minimax_h3_<fl2v or ref2v>_turbo_<4 or 8>step_v<x.y>[_768p][_bf16].safetensors"
"""The only place where steps, tasks and shift are told."""

_TASKS: Mapping[str, tuple[ArtifactTask, ...]] = {"fl2v": ("t2va", "fl2va"), "ref2v": ("ref2va",)}

RELEASED_ALPHA: Mapping[str, float] = {
    "fl2v_turbo_4step_v0.1": 8,
    "fl2v_turbo_4step_v1.0_768p": 128,
    "fl2v_turbo_4step_v1.1_768p": 128,
    "fl2v_turbo_4step_v1.2_768p": 8,
    "fl2v_turbo_8step_v1.0": 8,
    "fl2v_turbo_8step_v1.0_768p": 8,
    "ref2v_turbo_4step_v0.1": 8,
    "ref2v_turbo_8step_v1.0_768p": 8,
}
"""The published artifacts and their alpha (spec/contract.md 5)."""

WITHOUT_ALPHA = "fl2v_turbo_4step_v0.1"
"""The one that does not say its alpha."""


def is_turbo_name(name: str) -> bool:
    """Whether a file is named as the family's files are."""
    return _NAME.fullmatch(name) is not None


def read_turbo(header: Header, base: Base) -> Artifact:
    """The adapter of a file in the diffusers layout.

    Raises:
        CheckpointError: its name does not tell the schedule, or tells another alpha than the file; alpha is missing;
            the file is in another format, or holds not exactly one pair of the rank for each linear.
    """
    distilled = _distilled(header.file)
    if "key_format" in header.metadata:
        metadata.require(header, "key_format", KEY_FORMAT)
    metadata.refuse_orders(header)
    pairing = Pairing(header.file, RANK, _alpha(header, distilled.name) / RANK)
    modules = take_apart(header, PEFT_ROLES)
    check_modules(header.file, modules, base.block_linears)
    patches = {
        f"{module}.weight": Patch(pairing.low_rank(module, pieces, base.parameters[f"{module}.weight"].shape or ()))
        for module, pieces in modules.items()
    }
    return Artifact(header.file, distilled, patches, header.metadata)


def _distilled(file: Path) -> Distilled:
    """What the file's name says. Raises CheckpointError."""
    match = _NAME.fullmatch(file.name)
    if match is None:
        raise CheckpointError(file, "file name", f"{NAMES}, which tells steps, tasks and shift", file.name)
    name, kind, steps, small = match[1], match[2], match[3], match[4]
    if steps not in map(str, STEPS):
        raise CheckpointError(file, "file name", f"{' or '.join(map(str, STEPS))} steps", f"{steps} steps")
    schedule = PinnedSchedule(
        forwards=int(steps),
        video_shift=VIDEO_SHIFT_768P if small else RELEASED.video_shift,
        audio_shift=RELEASED.audio_shift,
    )
    return Distilled(name=name, family="turbo", tasks=_TASKS[kind], schedule=schedule)


def _alpha(header: Header, name: str) -> float:
    """Alpha as the file says it. No default but one: 1 and 8/128 are both in use, and differ sixteenfold."""
    if name == WITHOUT_ALPHA and "alpha" not in header.metadata:
        return RELEASED_ALPHA[name]
    rule = f"alpha, a positive number; only {WITHOUT_ALPHA} is known without (as {RELEASED_ALPHA[WITHOUT_ALPHA]:g})"
    alpha = metadata.take_number(header, "alpha", rule)
    if alpha != RELEASED_ALPHA.get(name, alpha):
        wanted = f"{RELEASED_ALPHA[name]:g}, with which {name} is published; has the file been renamed?"
        raise CheckpointError(header.file, "__metadata__.alpha", wanted, f"{alpha:g}")
    return alpha
