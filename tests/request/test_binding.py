"""Distilled models and adapters: what a request may say beside them, and what it then is (spec: contract 1.10, 5)."""

from __future__ import annotations

from typing import Any

import pytest

from engines.quality import Tier
from plugins.distilled import Distilled, Family, PinnedSchedule
from plugins.schedule import Schedule
from runtime.media.facts import ImageFacts
from runtime.references import KnownFile
from runtime.request import Limits, RequestError, Resolved, resolve, restore
from runtime.work import work_of
from tests.request.sizes import RELEASED

SMALLEST = {"aspect_ratio": "1:1", "width": 256, "height": 256, "duration": 4}

V1 = (0.999, 0.749, 0.5, 0.25, 0.0)
V2 = (0.999, 0.874, 0.749, 0.624, 0.5, 0.375, 0.25, 0.125, 0.0)


def distilled(name: str, family: Family, forwards: int, shift: float, **more: Any) -> Distilled:
    positions = more.pop("positions", None)
    schedule = PinnedSchedule(forwards=forwards, positions=positions, video_shift=shift, audio_shift=3.0)
    return Distilled(name=name, family=family, schedule=schedule, **{"tasks": ("t2va",), **more})


FASTH3 = distilled("fasth3-v1", "fasth3_v1", 4, 12.0, positions=V1)
FASTH3_V2 = distilled("fasth3-v2", "fasth3_v2", 8, 10.0, positions=V2)
TURBO = distilled("turbo-4step", "turbo", 4, 6.0, tasks=("t2va", "fl2va"))
TURBO_REFERENCES = distilled("turbo-ref", "turbo", 8, 12.0, tasks=("ref2va",))
FLASHGEN = distilled("flashgen", "flashgen", 4, 12.0, positions=(1.0, 0.7, 0.4, 0.15, 0.0))

STUDENT = Limits(tasks=("t2va",), student=FASTH3)
STUDENT_V2 = Limits(tasks=("t2va",), student=FASTH3_V2)
ADAPTERS = Limits(adapters=(TURBO, TURBO_REFERENCES, FLASHGEN))

PICTURE = KnownFile("IMAGES[0]", "0" * 64, 1000, 0.0, ImageFacts(width=512, height=512))


def take(limits: Limits, *media: KnownFile, **params: Any) -> Resolved:
    return resolve("a cat", {**SMALLEST, **params}, RELEASED, limits, media)


def refusal(limits: Limits, *media: KnownFile, **params: Any) -> str:
    with pytest.raises(RequestError) as caught:
        take(limits, *media, **params)
    return str(caught.value)


@pytest.mark.parametrize(
    ("limits", "forwards", "shift", "positions"), [(STUDENT, 4, 12.0, V1), (STUDENT_V2, 8, 10.0, V2)]
)
@pytest.mark.parametrize("spoken", [False, True], ids=["left out", "given"])
def test_a_student_has_its_own_schedule_given_or_not(
    limits: Limits, forwards: int, shift: float, positions: tuple[float, ...], spoken: bool
) -> None:
    params = {"num_inference_steps": forwards, "flow_shift": shift, "audio_flow_shift": 3} if spoken else {}
    found = take(limits, **params)
    assert (found.forwards, found.sigma_points, found.video_shift, found.audio_shift) == (
        forwards, forwards + 1, shift, 3.0
    )  # fmt: skip
    assert found.positions == positions
    assert found.adapter is None


def test_sigma_points_of_a_student_count_one_more() -> None:
    assert take(STUDENT, num_inference_steps=5, step_convention="sigma_points").forwards == 4


@pytest.mark.parametrize(
    ("limits", "params", "told"),
    [
        (STUDENT, {"num_inference_steps": 5},
         "num_inference_steps: got 5; the served model fasth3-v1 has exactly 4 evaluations; nearest legal: 4"),
        (STUDENT, {"extra_params": {"num_inference_steps": 49}},
         "extra_params.num_inference_steps: got 49; the served model fasth3-v1 has exactly 4 evaluations; "
         "nearest legal: 4"),
        (STUDENT, {"num_inference_steps": 4, "step_convention": "sigma_points"},
         "num_inference_steps: got 4; the served model fasth3-v1 has exactly 4 evaluations, 5 sigma points; "
         "nearest legal: 5"),
        (STUDENT, {"flow_shift": 6},
         "flow_shift: got 6.0; the served model fasth3-v1 has 12 and no other; nearest legal: 12.0"),
        (STUDENT, {"audio_flow_shift": 3.5},
         "audio_flow_shift: got 3.5; the served model fasth3-v1 has 3 and no other; nearest legal: 3.0"),
        (STUDENT, {"lora": {"name": "turbo"}},
         "lora: got 'turbo'; not offered (the served model fasth3-v1 is distilled itself, and takes no adapter)"),
        (STUDENT, {"task": "ref2va"},
         "task: got 'ref2va'; needs the weights ref2va, which are not loaded; this server serves t2va; "
         "nearest legal: t2va"),
        (STUDENT, {"task": "fl2va"},
         "task: got 'fl2va'; is not what the served model was distilled for; this server serves t2va; "
         "nearest legal: t2va"),
        (STUDENT_V2, {"num_inference_steps": 4},
         "num_inference_steps: got 4; the served model fasth3-v2 has exactly 8 evaluations; nearest legal: 8"),
        (STUDENT_V2, {"flow_shift": 12},
         "flow_shift: got 12.0; the served model fasth3-v2 has 10 and no other; nearest legal: 10.0"),
        (STUDENT_V2, {"guidance_scale": 5},
         "guidance_scale: got 5.0; the served model fasth3-v2 has 1 and no other; nearest legal: 1.0"),
    ],
)  # fmt: skip
def test_what_a_student_was_not_distilled_for_is_refused(limits: Limits, params: dict[str, Any], told: str) -> None:
    assert refusal(limits, **params) == told


def test_an_adapter_brings_its_schedule_and_the_base_keeps_its_own() -> None:
    turbo = take(ADAPTERS, lora={"name": "turbo-4step"})
    assert (turbo.adapter, turbo.forwards, turbo.video_shift, turbo.positions) == ("turbo-4step", 4, 6.0, None)
    flashgen = take(ADAPTERS, lora={"adapter": "flashgen", "lora_scale": 1.0})
    assert (flashgen.forwards, flashgen.positions) == (4, FLASHGEN.schedule.positions)
    base = take(ADAPTERS)
    assert (base.adapter, base.forwards, base.video_shift, base.positions) == (None, 49, 12.0, None)
    free = take(ADAPTERS, num_inference_steps=7, flow_shift=5)
    assert (free.forwards, free.video_shift) == (7, 5.0)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"lora": {"name": "other"}},
         "lora: got 'other'; must be an adapter of this server; "
         "nearest legal: turbo-4step or turbo-ref or flashgen"),
        ({"lora": {"name": "turbo-4step"}, "num_inference_steps": 5},
         "num_inference_steps: got 5; adapter turbo-4step has exactly 4 evaluations; nearest legal: 4"),
        ({"lora": {"name": "turbo-4step"}, "flow_shift": 12},
         "flow_shift: got 12.0; adapter turbo-4step has 6 and no other; nearest legal: 6.0"),
        ({"lora": {"name": "turbo-ref"}},
         "task: got 't2va'; adapter turbo-ref is for ref2va only; nearest legal: ref2va"),
        ({"lora": {"name": "turbo-4step"}, "task": "ref2va"},
         "task: got 'ref2va'; adapter turbo-4step is for t2va and fl2va only; nearest legal: t2va or fl2va"),
        ({"lora": {"name": "flashgen", "scale": 0.5}},
         "lora.scale: got 0.5; must be 1: an adapter is at the scale that it was trained at; nearest legal: 1"),
        ({"lora": {"name": "flashgen", "lora_scale": True}},
         "lora.lora_scale: got true; must be 1: an adapter is at the scale that it was trained at; nearest legal: 1"),
        ({"lora": {"name": "flashgen", "adapter": "flashgen"}},
         "lora.adapter: got 'flashgen'; not beside name: give one of the two"),
        ({"lora": {"nam": "flashgen"}}, "lora.nam: got 'flashgen'; unknown field; nearest legal: name"),
        ({"lora": {"scale": 1}}, "lora: got {'scale': 1}; must be an object such as {\"name\": NAME}"),
        ({"lora": {"name": 3}}, "lora.name: got 3; must be a string of 1 to 64 characters"),
        ({"lora": "flashgen"}, "lora: got 'flashgen'; must be an object such as {\"name\": NAME}"),
        ({"lora": None}, 'lora: got null; must be an object such as {"name": NAME}'),
        ({"extra_params": {"lora": {"name": "x"}}},
         "extra_params.lora: got 'x'; must be an adapter of this server; "
         "nearest legal: turbo-4step or turbo-ref or flashgen"),
    ],
)  # fmt: skip
def test_what_an_adapter_was_not_trained_for_is_refused(params: dict[str, Any], told: str) -> None:
    assert refusal(ADAPTERS, **params) == told


@pytest.mark.parametrize("key", ["path", "local_path", "lora_path", "lora_local_path", "int_id", "lora_int_id"])
def test_no_request_chooses_a_file(key: str) -> None:
    for limits in (ADAPTERS, STUDENT, Limits()):
        told = refusal(limits, lora={"name": "flashgen", key: "/etc/passwd"})
        assert told.startswith(f"lora.{key}: got '/etc/passwd'; not offered (the server's operator chooses")


def test_a_server_without_adapters_says_so() -> None:
    assert refusal(Limits(), lora={"name": "turbo"}) == "lora: got 'turbo'; not offered (this server has no adapters)"


def test_an_adapter_for_keyframes_takes_them() -> None:
    found = take(ADAPTERS, PICTURE, lora={"name": "turbo-4step"})
    assert (found.task, found.adapter, found.forwards) == ("fl2va", "turbo-4step", 4)
    assert refusal(ADAPTERS, PICTURE, lora={"name": "flashgen"}).startswith("task: got 'fl2va'; adapter flashgen is")


@pytest.mark.parametrize(
    ("limits", "params"),
    [(STUDENT, {}), (STUDENT_V2, {}), (ADAPTERS, {"lora": {"name": "flashgen"}}), (ADAPTERS, {})],
    ids=["v1", "v2", "flashgen", "base"],
)
def test_a_resolved_request_comes_back_over_the_wire_as_it_was(limits: Limits, params: dict[str, Any]) -> None:
    found = take(limits, **params)
    assert restore(found.model_dump_json(), RELEASED, limits) == found


@pytest.mark.parametrize(
    ("field", "value"),
    [("positions", (0.9, 0.7, 0.4, 0.15, 0.0)), ("positions", None), ("adapter", None), ("forwards", 5)],
)
def test_a_resolved_request_with_another_schedule_is_not_believed(field: str, value: object) -> None:
    forged = take(ADAPTERS, lora={"name": "flashgen"}).model_copy(update={field: value})
    with pytest.raises(RequestError):
        restore(forged.model_dump_json(), RELEASED, ADAPTERS)


@pytest.mark.parametrize(("distilled", "dense"), [(FASTH3, 2), (FLASHGEN, 1), (TURBO, 1), (FASTH3_V2, 2)])
def test_the_gate_of_skipping_is_that_of_the_schedule_that_is_run(distilled: Distilled, dense: int) -> None:
    """A quarter of V1's sigmas are above those of four equal steps; 0.96758 of V2 is the first below the gate."""
    skip = Tier(linears="bfloat16", attention="skip", skip_threshold=0.05, skip_below=0.97)
    limits = Limits(tasks=("t2va",), student=distilled, tiers=(skip,))
    whole, skipping = take(limits).quality.attending
    assert (whole.forwards, skipping.forwards) == (dense, distilled.schedule.forwards - dense)
    sampled = Schedule.pinned(distilled.schedule).video.sigmas[:-1]
    assert int((sampled > 0.97).sum()) == dense


def test_what_an_adapter_costs_is_measured_apart() -> None:
    kinds = {work_of(take(ADAPTERS, **p), 8, RELEASED)["denoise"].kind for p in ({}, {"lora": {"name": "flashgen"}})}
    assert len(kinds) == 2
