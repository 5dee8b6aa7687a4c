"""Why a request does not fit, and what would make it fit: every suggestion has been planned before it is made."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engines.plan.plan import Plan, StagePlan, Workload
from engines.plan.weights import Model
from engines.profile import COMPONENTS, Adapters, Component, Profile, Residency
from plugins.dimensions import FRAMES_PER_SECOND
from plugins.shape import legal_frames

Draft = Callable[[Profile, Model, Workload], Plan]

CHUNKS = (32768, 16384, 8192, 4096)
"""Rows through a block at once that are worth trying, most first."""

_CHEAPEST: tuple[Component, ...] = (
    "audio_encoder",
    "audio_decoder",
    "video_encoder",
    "video_decoder",
    "modulation",
    "text_encoder",
)
"""Components that run once a request, in the order in which taking them off the GPU costs time."""


@dataclass(frozen=True)
class Change:
    """Something to change in a profile or a request, as its words and as what they make of both."""

    words: str
    profile: Profile
    workload: Workload


def refuse(plan: Plan, profile: Profile, model: Model, draft: Draft) -> str:
    """The text of a refusal."""
    stage = max(plan.stages, key=lambda one: one.peak)
    over = plan.peak - plan.limit
    lines = [
        f"profile {profile.name}: {plan.workload.seconds:g} s of {plan.workload.aspect_ratio} does not fit: "
        f"{stage.name} needs {gigabytes(plan.peak)} of {gigabytes(plan.limit)} on one GPU, {gigabytes(over)} too much",
        f"  {arithmetic(stage)}",
    ]
    found = [change.words for change in suggestions(plan, profile, model, draft)]
    return "\n".join([*lines, *(f"  would fit: {words}" for words in found or ("nothing that the planner knows",))])


def arithmetic(stage: StagePlan) -> str:
    """What the fullest rank's memory adds up to."""
    parts = {
        "weights": stage.weights,
        "swapped or streamed in": stage.slots,
        "activations": stage.activations,
        "workspace": stage.workspace,
        "buffers": stage.buffers,
        "collectives": stage.collectives,
        "driver and process": stage.process,
    }
    return " + ".join(f"{words} {gigabytes(size)}" for words, size in parts.items() if size)


def gigabytes(size: float) -> str:
    """In units of 10^9 bytes."""
    return f"{size / 1e9:.2f} GB"


def suggestions(plan: Plan, profile: Profile, model: Model, draft: Draft) -> Iterator[Change]:
    """Changes that make the request fit, each by itself; if none does, one that takes several."""
    fits = _Fits(model, draft)
    single = [change for change in _single(plan, profile, model, fits) if fits(change)]
    yield from single
    if not single:
        yield from _several(plan, profile, model, fits)


@dataclass(frozen=True)
class _Fits:
    model: Model
    draft: Draft

    def __call__(self, change: Change) -> bool:
        plan = self.draft(change.profile, self.model, change.workload)
        return plan.peak <= plan.limit


def _single(plan: Plan, profile: Profile, model: Model, fits: _Fits) -> Iterator[Change]:
    workload = plan.workload
    yield from _fewer_copies(profile, workload)
    yield from _off_the_gpu(profile, workload)
    yield from _chunked(plan, profile, workload, fits)
    yield from _quantised(profile, workload)
    yield from _fewer_blocks(profile, workload, model, fits)
    yield from _shorter(profile, workload, model, fits)


def _several(plan: Plan, profile: Profile, model: Model, fits: _Fits) -> Iterator[Change]:
    """The changes that cost least, one upon the other, until it fits."""
    words: list[str] = []
    for change in _gather(plan, profile, plan.workload):
        words.append(change.words)
        profile = change.profile
        if fits(change):
            yield Change(" and ".join(words), profile, plan.workload)
            return
    for further in (_fewer_blocks, _shorter):
        for change in further(profile, plan.workload, model, fits):
            yield Change(" and ".join([*words, change.words]), change.profile, change.workload)
            return


def _gather(plan: Plan, profile: Profile, workload: Workload) -> Iterator[Change]:
    assert profile.residency is not None  # as profiles for GPUs are validated
    for component in _CHEAPEST:
        place = "streamed" if component in ("modulation", "text_encoder") else "swapped"
        if profile.residency.of(component) not in ("streamed", place):
            profile = _moved(profile, **{component: place})
            yield Change(f'residency.{component} = "{place}"', profile, workload)
    for change in _quantised(profile, workload):
        profile = change.profile
        yield change
    smallest = CHUNKS[-1]
    if smallest < (profile.row_chunk or plan.rows.local):
        profile = _with(profile, row_chunk=smallest)
        yield Change(f"row_chunk = {smallest}", profile, workload)


def _fewer_copies(profile: Profile, workload: Workload) -> Iterator[Change]:
    """Adapters without the linears' weights once more for each."""
    if workload.adapters and profile.adapters.mode == "merged":
        changed = _with(profile, adapters=Adapters(mode="low_rank"))
        yield Change('adapters.mode = "low_rank"', changed, workload)


def _off_the_gpu(profile: Profile, workload: Workload) -> Iterator[Change]:
    assert profile.residency is not None  # as profiles for GPUs are validated
    cheaper = {"resident": ("swapped", "streamed"), "swapped": ("streamed",), "streamed": ()}
    for component in COMPONENTS:
        if component != "denoiser":
            for place in cheaper[str(profile.residency.of(component))]:
                changed = _moved(profile, **{component: place})
                yield Change(f'residency.{component} = "{place}"', changed, workload)


def _chunked(plan: Plan, profile: Profile, workload: Workload, fits: _Fits) -> Iterator[Change]:
    """The largest chunk that fits."""
    for rows in CHUNKS:
        if rows < (profile.row_chunk or plan.rows.local):
            change = Change(f"row_chunk = {rows}", _with(profile, row_chunk=rows), workload)
            if fits(change):
                yield change
                return


def _quantised(profile: Profile, workload: Workload) -> Iterator[Change]:
    if profile.precision.denoiser in ("bfloat16", "float32"):
        precision = profile.precision.model_copy(update={"denoiser": "fp8"})
        yield Change('precision.denoiser = "fp8"', _with(profile, precision=precision), workload)


def _fewer_blocks(profile: Profile, workload: Workload, model: Model, fits: _Fits) -> Iterator[Change]:
    """The most resident blocks that fit."""
    assert profile.residency is not None  # as profiles for GPUs are validated
    now = profile.residency.denoiser
    most = now if isinstance(now, int) else model.outline.dimensions.denoiser.layers

    def change(blocks: int) -> Change:
        return Change(f"residency.denoiser = {blocks}", _moved(profile, denoiser=blocks), workload)

    # The peak grows with the blocks: the first that does not fit is found by halving.
    count = bisect.bisect_left(range(most), True, key=lambda blocks: not fits(change(blocks)))
    if count:
        yield change(count - 1)


def _shorter(profile: Profile, workload: Workload, model: Model, fits: _Fits) -> Iterator[Change]:
    """The longest duration that fits."""
    for frames in reversed(legal_frames(model.outline.dimensions.video_vae)):
        seconds = math.floor(frames / FRAMES_PER_SECOND * 1000) / 1000
        if seconds < workload.seconds:
            shorter = workload.model_copy(update={"seconds": seconds})
            change = Change(f"at most {seconds:g} s", profile, shorter)
            if fits(change):
                yield change
                return


def _moved(profile: Profile, **places: object) -> Profile:
    assert profile.residency is not None  # as profiles for GPUs are validated
    residency = Residency.model_validate(profile.residency.model_dump() | places)
    return _with(profile, residency=residency)


def _with(profile: Profile, **changes: object) -> Profile:
    return profile.model_copy(update=changes)
