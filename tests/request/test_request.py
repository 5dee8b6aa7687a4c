"""Properties of resolution over all legal requests, and over everything that is none."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.contract import ASPECT_RATIOS, EXTRA, FIELDS, GROUPS, PROMPT, PROMPT_CHARACTERS, Field, Status
from runtime.kinds import AspectRatio, Boolean, Choice, Integer, Number, Sides, Step, Text, WholeSeconds
from runtime.media.facts import Facts
from runtime.reference_kinds import FrameIndices, MediaUrls, NamedReferences, StartTimes
from runtime.request import Limits, RequestError, Resolved, parse_params, parse_prompt, resolve, restore
from tests.request.media_vectors import IMAGE, SOUND, SOUND_VIDEO, TALL, VIDEO, resolve_with
from tests.request.sizes import RELEASED

_RATIO = {"aspect_ratio": "16:9"}


def _resolve(**params: Any) -> Resolved:
    return resolve("a cat", {**_RATIO, **params}, RELEASED)


def _value(field: Field) -> st.SearchStrategy[Any]:
    """Legal values of an offered or accepted field."""
    kind = field.kind
    if field.only is not None:
        return st.sampled_from(field.only)
    if isinstance(kind, Integer):
        return st.integers(kind.minimum, kind.maximum)
    if isinstance(kind, Step):
        return st.sampled_from(kind.values)
    if isinstance(kind, Number):
        return st.floats(kind.minimum, kind.maximum)
    if isinstance(kind, Choice | AspectRatio):
        return st.sampled_from(kind.values if isinstance(kind, Choice) else kind.names)
    if isinstance(kind, Text):
        return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=50)
    return st.booleans()


_FREE = [
    field
    for field in FIELDS
    if not isinstance(field.kind, Sides | WholeSeconds | NamedReferences | MediaUrls | StartTimes | FrameIndices)
    and field.name not in ("model", "task", "width", "height", "short_edge", "num_inference_steps", "step_convention")
    and field.name not in ("quality", "lora")  # what a server offers: test_quality, test_binding
    and (field.only is None or field.only)
]
_SIDE = st.integers(8, 40).map(lambda cells: 32 * cells)
_LEGAL = st.fixed_dictionaries(
    {"aspect_ratio": st.sampled_from(ASPECT_RATIOS)},
    optional={field.name: _value(field) for field in _FREE if field.name not in ("aspect_ratio", "seed")},
).filter(lambda params: not {"crf", "video_bitrate"} <= params.keys())
_FEW_REFERENCES = st.lists(st.sampled_from([IMAGE, TALL, VIDEO, SOUND_VIDEO, SOUND]), min_size=1, max_size=6)
_CANVAS = st.tuples(_SIDE, _SIDE).filter(lambda sides: max(sides) <= 4 * min(sides))
_STEPS = st.one_of(
    st.integers(1, 200).map(lambda count: {"num_inference_steps": count}),
    st.integers(2, 201).map(lambda count: {"num_inference_steps": count, "step_convention": "sigma_points"}),
)


@settings(deadline=None)
@given(_LEGAL, st.none() | _CANVAS, _STEPS)
def test_a_resolved_request_survives_json_and_resolves_to_itself(
    params: dict[str, Any], sides: tuple[int, int] | None, steps: dict[str, Any]
) -> None:
    canvas = {"width": sides[0], "height": sides[1]} if sides else {}
    resolved = resolve("a cat", {**params, **canvas, **steps}, RELEASED)
    assert Resolved.model_validate_json(resolved.model_dump_json()) == resolved
    assert restore(resolved.model_dump_json(), RELEASED) == resolved
    assert resolved.sigma_points == resolved.forwards + 1


@settings(deadline=None)
@given(_LEGAL, _FEW_REFERENCES, st.integers(-(2**63), 2**63 - 11), st.booleans())
def test_a_request_with_media_survives_json_and_resolves_to_itself(
    params: dict[str, Any], media: list[Facts], seed: int, named: bool
) -> None:
    params |= {"seed": seed} | ({"task": "ref2va"} if named else {})
    try:
        resolved = resolve_with("a cat", params, media, RELEASED)
    except RequestError:
        # Four videos, sounds alone, keyframes that are none: the vectors say which.
        return
    assert restore(resolved.model_dump_json(), RELEASED) == resolved
    assert sorted(one.kind for one in resolved.references) == sorted(one.kind for one in media)
    assert resolved.seeds() == tuple(seed + i for i in range(resolved.outputs))


def test_references_keep_the_order_in_which_they_are_listed_or_go_by_type() -> None:
    listed = [{"type": "audio", "index": 0}, {"type": "video", "index": 0}, {"type": "image", "index": 0}]
    orders = {"as_sent": ["audio", "video", "image"], "by_type": ["image", "video", "audio"]}
    for order, kinds in orders.items():
        params = {"references": listed, "reference_order": order}
        resolved = resolve_with("a cat", params, [IMAGE, VIDEO, SOUND], RELEASED)
        assert [one.kind for one in resolved.references] == kinds


def test_start_times_go_to_videos_as_they_are_sent() -> None:
    params = {
        "references": [{"type": "video", "index": 1}, {"type": "video", "index": 0}],
        "start_time_seconds": [1, 2],
    }
    resolved = resolve_with("a cat", params, [VIDEO, SOUND_VIDEO], RELEASED)
    assert [(one.facts, one.start_time_seconds) for one in resolved.references] == [(SOUND_VIDEO, 1), (VIDEO, 2)]


def test_keyframes_are_the_ends_that_were_asked_for() -> None:
    roles = {(): ("first",), (0,): ("first",), (-1,): ("last",)}
    for indices, expected in roles.items():
        params = {"frame_indices": list(indices)} if indices else {}
        resolved = resolve_with("a cat", params, [IMAGE], RELEASED)
        assert tuple(one.role for one in resolved.references) == expected
    both = resolve_with("a cat", {}, [IMAGE, TALL], RELEASED)
    assert [(one.role, one.width, one.height) for one in both.references] == [("first", 1024, 768), ("last", 1024, 768)]


def test_without_its_weights_a_task_is_refused_naming_the_others() -> None:
    keyframes, references = Limits(tasks=("t2va", "fl2va")), Limits(tasks=("ref2va",))
    with pytest.raises(RequestError, match=r"^task: got 'ref2va'; needs the weights ref2va.* nearest legal: t2va or"):
        resolve_with("a cat", {}, [VIDEO], RELEASED, keyframes)
    with pytest.raises(RequestError, match=r"^task: got 't2va'; needs the weights fl2va.* nearest legal: ref2va"):
        resolve_with("a cat", {**_RATIO, "task": "t2va"}, [], RELEASED, references)
    # On a server of ref2va alone, that is what images are for.
    assert resolve_with("a cat", {}, [IMAGE], RELEASED, references).task == "ref2va"
    with pytest.raises(RequestError, match=r"^resolved.task"):
        restore(resolve_with("a cat", {}, [VIDEO], RELEASED).model_dump_json(), RELEASED, keyframes)


def test_a_field_of_another_task_is_noted() -> None:
    notes = resolve_with("a cat", {"aspect_ratio": "1:1", "reference_short_edge": 512}, [IMAGE], RELEASED).notes
    assert "aspect_ratio has no effect for fl2va" in notes
    assert "reference_short_edge has no effect for fl2va" in notes
    assert "frame_indices has no effect for t2va" in _resolve(frame_indices=[0]).notes


def test_a_ratio_that_nobody_gave_does_not_give_way() -> None:
    for params in ({}, {"task": "ref2va"}):
        notes = resolve_with("a cat", {**params, "size": "256x256"}, [IMAGE], RELEASED).notes
        assert not [note for note in notes if "gives way" in note]


def test_a_forged_reference_is_refused() -> None:
    honest = json.loads(resolve_with("a cat", {}, [SOUND_VIDEO, IMAGE], RELEASED).model_dump_json())
    video = honest["references"][1]
    assert video["kind"] == "video"
    forged: dict[str, Any] = {
        "latent_frames": 10**6,
        "audio_latents": 0,
        "encoded_frames": 39,
        "width": 32,
        "vision_grid": [1, 2, 2],
        "timestamps": [],
        "role": "first",
        "kind": "image",
        "facts": {**video["facts"], "frames": 48},
        "sha256": "../../etc/passwd",
    }
    for name, value in forged.items():
        with pytest.raises(RequestError, match=r"^resolved"):
            restore(json.dumps({**honest, "references": [honest["references"][0], {**video, name: value}]}), RELEASED)
    for facts in ({**video["facts"], "width": 10**6}, {**video["facts"], "seconds": 15.2}):
        with pytest.raises(RequestError, match=r"^resolved\.references\[1\]: .* (side of|15 s in all)"):
            restore(
                json.dumps({**honest, "references": [honest["references"][0], {**video, "facts": facts}]}), RELEASED
            )
    with pytest.raises(RequestError, match=r"^resolved\.references\[1\]: .*bytes"):
        restore(json.dumps({**honest, "references": [honest["references"][0], {**video, "bytes": 1 << 30}]}), RELEASED)
    for name in ("condition_video_rows", "condition_audio_rows", "condition_seed", "outputs"):
        with pytest.raises(RequestError, match=rf"^resolved\.{name}|num_outputs"):
            restore(json.dumps({**honest, name: 11}), RELEASED)


@settings(deadline=None)
@given(st.floats(4, 15))
def test_every_legal_duration_lands_on_the_lowest_grid_point_that_holds_it(duration: float) -> None:
    resolved = _resolve(duration=duration)
    # Exact rational arithmetic, rounded half to even by Fraction itself.
    asked = round(Fraction(duration * 24))
    clips, rest = divmod(resolved.frames - 5, 17)
    assert rest == 0
    assert resolved.frames - 17 < asked <= resolved.frames
    assert resolved.latent_frames == 5 * clips + 2
    assert resolved.audio_latents == round(Fraction(resolved.frames * 40, 24))
    assert resolved.seconds == resolved.frames / 24


@settings(deadline=None)
@given(st.integers(256, 4096), st.integers(256, 4096))
def test_snapping_floors_and_says_so_and_without_it_the_side_is_refused(width: int, height: int) -> None:
    floored = width // 32 * 32, height // 32 * 32
    wanted = {"width": width, "height": height}
    if max(floored) > 4 * min(floored):
        with pytest.raises(RequestError, match="1:4 to 4:1"):
            _resolve(**wanted, snap=True)
        return
    resolved = _resolve(**wanted, snap=True)
    assert (resolved.width, resolved.height) == floored
    notes = [note for note in resolved.notes if "floored" in note]
    moved = [name for name, side in wanted.items() if side % 32]
    assert [note.split()[0] for note in notes] == moved
    if moved:
        with pytest.raises(RequestError, match=f"{moved[0]}: got {wanted[moved[0]]}; .*multiple of 32"):
            _resolve(**wanted)


@settings(deadline=None)
@given(st.integers(256, 4096).map(lambda side: side // 32 * 32), st.integers(256, 4096).map(lambda s: s // 32 * 32))
def test_an_extreme_canvas_is_refused_naming_a_legal_one(width: int, height: int) -> None:
    if max(width, height) <= 4 * min(width, height):
        return
    with pytest.raises(RequestError) as caught:
        _resolve(width=width, height=height)
    assert _resolve(size=caught.value.nearest).height == height


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from([*GROUPS, EXTRA, *(field.name for field in FIELDS)]) | st.text(max_size=12)
_WILD = st.dictionaries(_KEYS, _JSON | _value(FIELDS[0]) | st.dictionaries(_KEYS, _JSON, max_size=3), max_size=4)


@settings(deadline=None)
@given(st.text() | st.binary(), _WILD)
def test_any_parameters_object_resolves_or_is_refused_in_one_bounded_line(prompt: str | bytes, params: Any) -> None:
    _check_refusal(lambda: resolve(prompt, {**_RATIO, **params}, RELEASED))


@settings(deadline=None)
@given(st.text() | st.binary() | _JSON.map(json.dumps) | st.text(alphabet='[]{}",:1e9.\\'))
def test_any_bytes_parse_or_are_refused_in_one_bounded_line(raw: str | bytes) -> None:
    _check_refusal(lambda: resolve("a cat", parse_params(raw), RELEASED))


@settings(deadline=None)
@given(st.text() | st.binary() | _JSON.map(json.dumps))
def test_any_bytes_restore_or_are_refused_in_one_bounded_line(raw: str | bytes) -> None:
    _check_refusal(lambda: restore(raw, RELEASED))


def _check_refusal(action: Any) -> None:
    try:
        action()
    except RequestError as error:
        message = str(error)
        assert len(message.encode("utf-8")) < 2000
        assert message.isprintable()
        json.dumps(error.to_dict(), allow_nan=False)


@pytest.mark.parametrize("field", [f for f in FIELDS if isinstance(f.kind, Integer | Number)], ids=lambda f: f.name)
def test_a_value_outside_its_range_is_refused_with_the_field_and_the_bound(field: Field) -> None:
    kind = field.kind
    assert isinstance(kind, Integer | Number)
    for beyond, bound in ((kind.minimum - 1, kind.minimum), (kind.maximum + 1, kind.maximum)):
        with pytest.raises(RequestError) as caught:
            _resolve(**{field.name: beyond})
        assert (caught.value.field, caught.value.rule, caught.value.nearest) == (field.name, kind.rule, bound)


_TYPED = [f for f in FIELDS if f.status is not Status.NOT_OFFERED and "list" not in f.kind.type_name]


@pytest.mark.parametrize("field", _TYPED, ids=lambda f: f.name)
def test_a_value_of_another_type_is_refused_with_the_field(field: Field) -> None:
    wrong = 1 if isinstance(field.kind, Boolean) else True
    values: list[Any] = [wrong, None, [], {}]
    for value in values:
        with pytest.raises(RequestError) as caught:
            _resolve(**{field.name: value})
        assert (caught.value.field, caught.value.rule) == (field.name, field.kind.rule)


@pytest.mark.parametrize("field", [f for f in FIELDS if f.status is Status.NOT_OFFERED], ids=lambda f: f.name)
def test_a_field_that_is_not_offered_is_refused_unless_it_is_off(field: Field) -> None:
    for off in field.only or ():
        assert _resolve(**{field.name: off}) == _resolve()
    with pytest.raises(RequestError) as caught:
        _resolve(**{field.name: {"anything": 1}})
    kept_kind = field.kind.rule
    assert caught.value.field == field.name
    assert "not offered" in caught.value.rule or caught.value.rule == kept_kind


def test_false_and_zero_are_not_each_other() -> None:
    look_alikes: dict[str, Any] = {"latent_upscale": 0, "preencode_batch_frames": 17.0}
    for name, value in look_alikes.items():
        with pytest.raises(RequestError, match=f"{name}: .* not offered"):
            _resolve(**{name: value})


def test_a_field_without_effect_is_checked_and_noted() -> None:
    assert any("guidance_scale has no effect" in note for note in _resolve(guidance_scale=1).notes)
    assert any("short_edge has no effect" in note for note in _resolve(size="256x256", short_edge=1440).notes)
    with pytest.raises(RequestError, match="negative_prompt"):
        _resolve(negative_prompt="x" * (PROMPT_CHARACTERS + 1))


def test_what_gives_way_is_noted() -> None:
    notes = _resolve(duration=4, target={"duration_seconds": 8}, seed=1, extra_params={"seed": 2}, num_frames=100).notes
    assert "duration 4.0 gives way to target.duration_seconds 8.0" in notes
    assert "seed 1 gives way to extra_params.seed 2" in notes
    assert "num_frames 100 gives way to target.duration_seconds 8.0" in notes


def test_raising_to_the_grid_is_noted_and_a_grid_length_is_not() -> None:
    assert "duration 4.0 is 96 frames, raised to 107 (17n + 5)" in _resolve(duration=4).notes
    assert _resolve(duration=8).notes == ()


def test_a_ratio_that_the_sides_override_is_noted() -> None:
    assert "aspect_ratio 16:9 gives way to 256x256" in _resolve(size="256x256").notes
    assert _resolve(size="1024x576", duration=8).notes == ()


@pytest.mark.parametrize("name", ["flow_shift", "audio_flow_shift"])
def test_the_bounds_of_a_shift_keep_the_float32_grid_finite_and_strictly_falling(name: str) -> None:
    (kind,) = [field.kind for field in FIELDS if field.name == name]
    assert isinstance(kind, Number)
    for shift in (kind.minimum, kind.maximum):
        base = torch.linspace(1, 0, 201, dtype=torch.float32)
        sigmas = shift * base / (1 + (shift - 1) * base)
        assert bool(torch.isfinite(sigmas).all())
        assert bool((sigmas[1:] < sigmas[:-1]).all())


def test_a_forged_resolved_request_is_refused() -> None:
    honest = json.loads(_resolve(size="256x256", duration=4).model_dump_json())
    forged: list[tuple[str, Any]] = [
        ("frames", 10**9),
        ("frames", -(10**400)),
        ("video_rows", 1),
        ("latent_width", 17),
        ("forwards", 10**6),
        ("seed", 2**70),
        ("width", 250),
    ]
    for name, value in forged:
        with pytest.raises(RequestError, match=r"^resolved\."):
            restore(json.dumps({**honest, name: value}), RELEASED)
    with pytest.raises(RequestError, match=r"resolved\.seconds"):
        restore(json.dumps({**honest, "seconds": 5.0}), RELEASED)
    with pytest.raises(RequestError, match="resolved"):
        restore("{}", RELEASED)


def test_the_served_model_may_be_named() -> None:
    assert resolve("a cat", {**_RATIO, "model": "mine"}, RELEASED, Limits(model="mine")).frames == 209


def test_limits_of_the_json_itself() -> None:
    assert parse_params('{"user": "' + "x" * (65536 - 12) + '"}')["user"] == "x" * (65536 - 12)
    assert parse_params('{"user": "[[[[[[[[[[[["}') == {"user": "[" * 12}
    url = "data:image/png;base64," + "A" * 200_000
    assert parse_params(json.dumps({"image_reference": {"image_url": url}}))["image_reference"]["image_url"] == url
    with pytest.raises(RequestError, match="at most 89544021 bytes of JSON, data: URLs included"):
        parse_params('{"user": "data:' + "A" * 89_544_021 + '"}')
    assert parse_params('{"lora": ' + "[" * 7 + "]" * 7 + "}")
    with pytest.raises(RequestError, match="at most 1000 digits"):
        parse_params('{"seed": ' + "1" * 5000 + "}")
    assert math.isnan(parse_params('{"duration": NaN}')["duration"])


def test_parameters_from_a_program_may_be_no_json_at_all() -> None:
    nested: dict[str, Any] = {}
    nested["lora"] = nested
    programs: list[Any] = [{1: 2}, {"seed": 10**5000}, {"lora": object()}, nested, [("seed", 1)], None]
    for params in programs:
        with pytest.raises(RequestError) as caught:
            resolve("a cat", params, RELEASED)
        assert len(str(caught.value)) < 300


def test_the_prompt_is_kept_verbatim() -> None:
    for text in (" leading", "trailing\n", "e\u0301 is not \xe9", "\ufeffmark", "<d>Hi</d>", "😀" * PROMPT_CHARACTERS):
        assert parse_prompt(text.encode()) == text
    with pytest.raises(RequestError, match=PROMPT.name):
        parse_prompt("\ud800")


# Quadratic work on it would take minutes; a linear check takes milliseconds.
@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ['\\"', '"', "\\", '["', '"\\'])
def test_text_of_unterminated_strings_is_refused_without_searching_it_again_and_again(unit: str) -> None:
    with pytest.raises(RequestError, match="parameters"):
        parse_params('{"user": "' + unit * (65_000 // len(unit)))
