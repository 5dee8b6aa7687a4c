"""FlashGen: a 4-step adapter in the native layout, which changes AdaLN too (spec/model.md 8.5)."""

from __future__ import annotations

from collections.abc import Mapping

from export.artifacts import metadata
from export.artifacts.artifact import Artifact, LowRank, Patch
from export.artifacts.base import Base
from export.artifacts.pieces import PEFT_ROLES, Pairing, Pieces, check_modules, take_apart
from export.checkpoint.components import denoiser
from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Stored
from export.checkpoint.recipes import Recipe, expression, native_declarations
from export.checkpoint.safetensors_file import Header
from export.checkpoint.student import check_sigmas
from plugins.distilled import Distilled, PinnedSchedule

KEY_FORMAT = "minimax-h3-native"
QKV_LAYOUT = "grouped"
"""Rows of the fused projection as the release has them: q, k, v of head 0, then of head 1, ..."""

RANK = ALPHA = 64
FORWARDS = 4
PREFIX = "transformer."
FILE = "minimax_h3_t2va_flashgen_4step_v1.0_768p_bf16.safetensors"


def read_flashgen(header: Header, base: Base) -> Artifact:
    """The adapter of a file in the native layout, as patches of diffusers parameters.

    Its shifts are those of the base, whatever "768p" in its name means for other families.

    Raises:
        CheckpointError: the file is renamed, its metadata are not those of the family, or it does not hold exactly one
            pair of the rank for each linear.
    """
    if header.file.name != FILE:
        raise CheckpointError(header.file, "file name", f"{FILE}, as it is published", header.file.name)
    for key, wanted in (("key_format", KEY_FORMAT), ("qkv_layout", QKV_LAYOUT), ("tasks", "t2va")):
        metadata.require(header, key, wanted)
    metadata.require_count(header, "lora_rank", RANK, "the rank of the family")
    alpha = metadata.take_number(header, "lora_alpha", f"{ALPHA}, the alpha of the family")
    if alpha != ALPHA:
        raise CheckpointError(header.file, "__metadata__.lora_alpha", f"{ALPHA}, the alpha of the family", f"{alpha:g}")
    metadata.refuse_orders(header, ("qkv_layout",))
    positions = metadata.take_positions(header, "base_schedule", FORWARDS + 1)
    patches = _patches(header, base, Pairing(header.file, RANK, alpha / RANK))
    schedule = PinnedSchedule(
        forwards=FORWARDS, positions=positions, video_shift=base.video_shift, audio_shift=base.audio_shift
    )
    check_sigmas(schedule, header.file, "__metadata__.base_schedule")
    name = FILE.removeprefix("minimax_h3_").removesuffix("_bf16.safetensors")
    distilled = Distilled(name=name, family="flashgen", tasks=("t2va",), schedule=schedule)
    return Artifact(header.file, distilled, patches, header.metadata)


def _patches(header: Header, base: Base, pairing: Pairing) -> dict[str, Patch]:
    recipes = denoiser.recipes(base.config)
    targets = {f"{module}.weight": recipes[f"{module}.weight"] for module in (*base.block_linears, *base.adaln_linears)}
    modules = take_apart(header, PEFT_ROLES, PREFIX)
    check_modules(header.file, modules, {_module(recipe) for recipe in targets.values()})
    shapes = native_declarations(base.parameters, targets)
    pairs = {
        module: pairing.low_rank(module, pieces, shapes[f"{module}.weight"].shape or ())
        for module, pieces in modules.items()
    }
    return {name: _patch(recipe, pairs[_module(recipe)], modules) for name, recipe in targets.items()}


def _module(recipe: Recipe) -> str:
    return recipe.key.removesuffix(".weight")


def _patch(recipe: Recipe, pair: LowRank, modules: Mapping[str, Pieces]) -> Patch:
    """The part of a fused pair that a diffusers parameter gets: the whole of A, and its own rows of B."""
    up: Stored = modules[_module(recipe)]["up"]
    return Patch(LowRank(pair.down, expression(recipe, {recipe.key: up}, "interleaved"), pair.scale))
