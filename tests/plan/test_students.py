"""What a pinned schedule spares: the weights of its tables are in no memory, and a request has its forwards."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.plan import Plan, PlanError, Workload, make_plan, released_outline
from engines.profile import Profile
from plugins.distilled import Distilled, PinnedSchedule, VideoSparse

SCHEDULE = PinnedSchedule(forwards=4, positions=(0.999, 0.749, 0.5, 0.25, 0.0), video_shift=12.0, audio_shift=3.0)
STUDENT = Distilled(name="fasth3-v1", family="fasth3_v1", tasks=("t2va",), schedule=SCHEDULE)

ADALN = 2 * (50 * 96768 * (2688 + 1) + 10752 * (2688 + 1))
"""Bytes of all projections, in bfloat16."""

TIME = 4 * (5376 * (256 + 1) + 2688 * (5376 + 1))
"""Bytes of the time embedding, in float32."""

TRANSFORMER = 66_280_430_080
"""Bytes of the release's transformer (spec: model 1a)."""


def plan(student: Distilled | None, profile: str = "h200_inductor", **work: float) -> Plan:
    return make_plan(Profile.load(profile), released_outline(student), Workload.model_validate(work))


def component(plan: Plan, name: str) -> int:
    return sum(graph.weights for graph in plan.graphs if graph.component == name)


def test_the_loop_holds_38_6_of_66_3_gigabytes_and_the_tables_were_made_of_26_1() -> None:
    pinned = plan(STUDENT)
    context = pinned.graph("context").weights
    assert pinned.folded == ADALN + TIME
    assert component(pinned, "denoiser") + context + pinned.folded == TRANSFORMER
    assert (component(pinned, "denoiser") / 1e9, ADALN / 1e9) == (
        pytest.approx(38.6, abs=0.06),
        pytest.approx(26.1, abs=0.06),
    )
    assert component(pinned, "modulation") == 0
    # 4 steps of 4 slots: 50 blocks' 18 vectors and the head's 2, in bfloat16.
    assert pinned.tables == 4 * 4 * (50 * 96768 + 2 * 5376) * 2


@pytest.mark.parametrize("profile", ["h200_inductor", "b300", "rtx5090", "rtx4090", "h200x8"])
def test_a_request_of_it_never_needs_more_and_has_its_forwards(profile: str) -> None:
    free, pinned = plan(None, profile, seconds=5), plan(STUDENT, profile, seconds=5)
    assert pinned.workload.forwards == 4
    assert pinned.partitions == ("fl2va",)
    assert pinned.peak <= free.peak
    assert pinned.stage("modulation").flops == pinned.stage("modulation").transferred == 0
    assert pinned.stage("denoise").flops == pytest.approx(free.stage("denoise").flops * 4 / 49)


def test_what_is_resident_is_less_by_just_that() -> None:
    """A second partition aside: a student has one."""
    free = make_plan(
        Profile.load("h200_inductor").model_copy(update={"partitions": ("fl2va",)}), released_outline(), Workload()
    )
    resident = free.stage("denoise").weights - plan(STUDENT).stage("denoise").weights
    assert resident == free.graph("modulation.adaln").weights + free.graph("modulation.time").weights


def test_other_forwards_are_refused_with_its_own() -> None:
    with pytest.raises(PlanError, match="forwards = 49: fasth3-v1 has exactly 4"):
        plan(STUDENT, forwards=49)


def test_a_profile_without_a_partition_of_its_tasks_is_refused() -> None:
    with pytest.raises(PlanError, match="has no partition that the checkpoint has tasks of"):
        plan(STUDENT.model_copy(update={"tasks": ("ref2va",)}))


def test_adapters_beside_it_are_refused() -> None:
    with pytest.raises(PlanError, match="adapters = 2: fasth3-v1 is distilled itself, and takes none"):
        plan(STUDENT, adapters=2)


def test_the_disk_holds_the_base_and_what_the_student_has_of_its_own() -> None:
    gates = 50 * 7168 * 5376 * 2
    one = Profile.load("h200").model_copy(update={"partitions": ("fl2va",)})
    base = make_plan(one, released_outline(), Workload()).checkpoint
    sparse: dict[str, Any] = {"video_sparse": VideoSparse(sparsity=0.9)}
    whole: dict[str, Any] = sparse | {"family": "fasth3_v2"}
    kinds: dict[str, dict[str, Any]] = {"dense": {}, "vsa": sparse, "whole": whole}
    own = {key: plan(STUDENT.model_copy(update=kind)).checkpoint - base for key, kind in kinds.items()}
    assert own["dense"] == pytest.approx(TRANSFORMER, abs=1e6)
    assert own["vsa"] == own["whole"] == own["dense"] + gates


def test_the_plan_says_what_is_folded() -> None:
    told = json.loads(plan(STUDENT).to_json())
    assert (told["student"], told["folded"]) == ("fasth3-v1", ADALN + TIME)
    told = json.loads(plan(None).to_json())
    assert (told["student"], told["folded"]) == (None, 0)
