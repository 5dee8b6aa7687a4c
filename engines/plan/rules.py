"""What a profile must be for a model, whatever fits: ranks that divide it, and sizes that its engines are built for."""

from __future__ import annotations

from engines.plan.graphs import Costs
from engines.plan.plan import PlanError, Workload
from engines.plan.run import Weighing
from engines.plan.weights import Model
from engines.profile import Profile
from plugins.dimensions import Dimensions
from plugins.shape import SECONDS_MAXIMUM, SECONDS_MINIMUM


def check(profile: Profile, model: Model, workload: Workload) -> None:
    """Checks ranks, partitions and sizes.

    Raises:
        PlanError: for the first one that is wrong, with the nearest that is right.
    """
    outline = model.outline
    check_ranks(profile, outline.dimensions)
    student = outline.student
    if student is not None and workload.forwards != student.schedule.forwards:
        rule = f"{student.name} has exactly {student.schedule.forwards}"
        raise PlanError(f"forwards = {workload.forwards}: {rule}")
    if not profile.partitions:
        raise PlanError(f"profile {profile.name}: has no partition that the checkpoint has tasks of; add one")
    if student is not None and workload.adapters:
        raise PlanError(f"adapters = {workload.adapters}: {student.name} is distilled itself, and takes none")
    missing = [partition for partition in profile.partitions if partition not in outline.partitions]
    if missing:
        raise PlanError(f"profile {profile.name}: partition {missing[0]} is not in the checkpoint; leave it out")
    if student and student.video_sparse and profile.backend == "tensorrt_rtx":
        rule = f"{student.name} attends to video tiles alone, which this backend has no operation for"
        raise PlanError(f"profile {profile.name}: backend = 'tensorrt_rtx': {rule}; take a profile of another one")
    if not SECONDS_MINIMUM <= workload.seconds <= SECONDS_MAXIMUM:
        raise PlanError(f"seconds = {workload.seconds:g}: must be from {SECONDS_MINIMUM} to {SECONDS_MAXIMUM}")
    _check_shapes(profile, Costs(Weighing(profile, model), workload))


def check_ranks(profile: Profile, dimensions: Dimensions) -> None:
    """Checks that the ranks of each stage divide what they share.

    Raises:
        PlanError: for the first that do not, with the nearest that do.
    """
    size, text = dimensions.denoiser, dimensions.text_encoder
    _check_divisor(profile, "ranks.ulysses", profile.ranks.ulysses, size.heads, "attention heads")
    _check_divisor(profile, "ranks.text_encoder", profile.ranks.text_encoder, text.kv_heads, "key and value heads")


def sizes(costs: Costs) -> dict[str, int]:
    """The request's size along each axis that a profile limits."""
    rows = costs.rows
    return {
        "rows": rows.total,
        "text_rows": rows.text,
        "video_rows": rows.video,
        "audio_rows": rows.audio,
        "audio_latents": costs.shape.audio_latents,
        "vision_rows": max(costs.references.patches, default=0),
        "clip_frames": costs.references.clip_frames,
        "audio_samples": costs.references.samples * min(1, costs.references.tracks),
    }


def _check_divisor(profile: Profile, key: str, ranks: int, whole: int, of_what: str) -> None:
    if whole % ranks:
        legal = [n for n in range(1, whole + 1) if whole % n == 0]
        nearest = min(legal, key=lambda n: abs(n - ranks))
        rule = f"must divide the {whole} {of_what}; nearest legal: {nearest}"
        raise PlanError(f"profile {profile.name}: {key} = {ranks}: {rule}")


def _check_shapes(profile: Profile, costs: Costs) -> None:
    found = sizes(costs)
    for axis, ends in profile.shapes.items():
        if found[axis] > ends[-1]:
            rule = f"its engines take at most {ends[-1]:,} (shapes.{axis}); ask for less, or raise it"
            raise PlanError(f"profile {profile.name}: the request has {found[axis]:,} {axis}; {rule}")
