"""What a distilled model, or an adapter that a request chooses, binds the request to: its task and its schedule.

spec/contract.md 5: nothing but what it was trained for is run, and what a request asks beyond that is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plugins.dimensions import Dimensions
from plugins.distilled import Distilled
from runtime.contract import DEFAULT_FORWARDS, EVALUATIONS, SIGMA_POINTS
from runtime.given import GivenFields
from runtime.refusal import RequestError
from runtime.task import Task


class Sampling(NamedTuple):
    """A request's schedule, as its fields and `Resolved` have it."""

    forwards: int
    positions: tuple[float, ...] | None
    video_shift: float
    audio_shift: float


class Bound(NamedTuple):
    """Who binds a request: `title` is how errors name it."""

    title: str
    distilled: Distilled


def bound_by(fields: GivenFields, student: Distilled | None, adapters: Sequence[Distilled]) -> Bound | None:
    """The adapter that the request chooses, else the model if it is a student. Raises RequestError."""
    given = fields.given("lora")
    if given is None:
        return None if student is None else Bound(f"the served model {student.name}", student)
    if student is not None:
        rule = f"not offered (the served model {student.name} is distilled itself, and takes no adapter)"
        raise RequestError(given.spelling, given.value, rule)
    offered = {one.name: one for one in adapters}
    if not offered:
        raise RequestError(given.spelling, given.value, "not offered (this server has no adapters)")
    name = str(given.value)
    if name not in offered:
        raise RequestError(given.spelling, name, "must be an adapter of this server", tuple(offered))
    return Bound(f"adapter {name}", offered[name])


def check_task(fields: GivenFields, task: Task, bound: Bound | None) -> None:
    """Refuses a task that was not distilled. Raises RequestError."""
    if bound is not None and task not in bound.distilled.tasks:
        tasks = bound.distilled.tasks
        raise RequestError(fields.spelling("task"), task, f"{bound.title} is for {' and '.join(tasks)} only", tasks)


def sampling(fields: GivenFields, bound: Bound | None, dimensions: Dimensions) -> Sampling:
    """The schedule that the fields ask for, or that is the only one. Raises RequestError."""
    if bound is None:
        return Sampling(
            _forwards(fields) or DEFAULT_FORWARDS,
            None,
            fields.value("flow_shift", dimensions.video_shift),
            fields.value("audio_flow_shift", dimensions.audio_shift),
        )
    pinned = bound.distilled.schedule
    _check_forwards(fields, bound)
    _check_fixed(fields, "flow_shift", pinned.video_shift, bound)
    _check_fixed(fields, "audio_flow_shift", pinned.audio_shift, bound)
    if bound.distilled.family == "fasth3_v2":
        _check_fixed(fields, "guidance_scale", 1.0, bound)
    return Sampling(pinned.forwards, pinned.positions, pinned.video_shift, pinned.audio_shift)


def _forwards(fields: GivenFields) -> int | None:
    """Evaluations of the denoiser, from the count and the convention it is given in; None: it is not given."""
    steps = fields.given("num_inference_steps")
    if steps is None:
        return None
    points = _counts_points(fields)
    count = (SIGMA_POINTS if points else EVALUATIONS).check(steps.spelling, steps.value)
    return count - points


def _counts_points(fields: GivenFields) -> bool:
    return bool(fields.value("step_convention") == "sigma_points")


def _check_forwards(fields: GivenFields, bound: Bound) -> None:
    wanted, pinned = _forwards(fields), bound.distilled.schedule.forwards
    if wanted in (None, pinned):
        return
    points = _counts_points(fields)
    counted = f"{pinned} evaluations" + (f", {pinned + 1} sigma points" if points else "")
    steps = fields.given("num_inference_steps")
    assert steps is not None  # it was counted
    raise RequestError(steps.spelling, steps.value, f"{bound.title} has exactly {counted}", pinned + points)


def _check_fixed(fields: GivenFields, name: str, pinned: float, bound: Bound) -> None:
    given = fields.given(name)
    if given is not None and given.value != pinned:
        raise RequestError(given.spelling, given.value, f"{bound.title} has {pinned:g} and no other", pinned)
