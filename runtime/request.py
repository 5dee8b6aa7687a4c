"""From a prompt and a parameters object to a fully resolved request, or to one refusal.

No arithmetic and no choice is left to later stages.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engines.quality import Tier
from plugins.dimensions import FRAMES_PER_SECOND, Dimensions
from plugins.distilled import Distilled
from plugins.shape import (
    ASPECT_RATIOS,
    SECONDS_MAXIMUM,
    SHORT_EDGE,
    SIDE_MULTIPLE,
    Shape,
    canvas_of,
    grid_frames,
    ratio_of,
    requested_frames,
)
from runtime.binding import bound_by, check_task, sampling
from runtime.contract import (
    AUTOMATIC,
    CACHED_TIER,
    DEFAULT_FRAMES,
    DEFAULT_RATIO,
    FIELD,
    MEDIA_BYTES,
    PARAMETERS_BYTES,
    PARAMETERS_DEPTH,
    PROMPT,
    SIDE_RATIO_MAXIMUM,
    Colour,
    Given,
)
from runtime.estimate import Estimate
from runtime.geometry import KeyframeGeometry
from runtime.given import GivenFields
from runtime.kinds import Integer, is_unicode
from runtime.media.facts import ImageFacts, SoundFacts
from runtime.media.limits import check_bytes, check_sides, check_together
from runtime.quality import Quality, quality
from runtime.reference_kinds import KEYFRAME_INDICES, Keyframe, ReferenceOrder, Role
from runtime.references import KnownFile, Reference, Target, reference
from runtime.references import condition_rows as condition_rows_of
from runtime.refusal import MISSING, RequestError, show
from runtime.task import TASKS, Task, check_media, choose_task, counted

__all__ = ["Limits", "Media", "RequestError", "Resolved", "parse_params", "parse_prompt", "resolve", "restore"]

CONDITION_SEED = 42
"""Seed of every condition's posterior sample, whatever the request's: the same picture is always the same condition, as
when the released model was trained (spec: model 3.5)."""

_INTEGER_DIGITS = 1_000
_DATA_URL = re.compile(r'"data:[^"\\]*"')
# Base64 writes three bytes as four characters.
_WRITTEN_BYTES = MEDIA_BYTES * 4 // 3 + PARAMETERS_BYTES


class Limits(BaseModel):
    """What one server adds to the contract."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(default="h3", description="the name that the field `model` must equal")
    tasks: tuple[Task, ...] = Field(default=TASKS, description="those whose weights are loaded")
    student: Distilled | None = Field(default=None, description="what the served model was distilled to, if it was")
    adapters: tuple[Distilled, ...] = Field(default=(), description="those that requests may choose")
    tiers: tuple[Tier, ...] = Field(
        default=(Tier(linears="bfloat16", attention="dense"),),
        min_length=1,
        description="the tiers of quality; the first is that of requests that name none",
    )


class Media(BaseModel):
    """Options of the MP4."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    container: str
    crf: int | None = Field(description="none where video_bitrate decides")
    video_bitrate: int | None = Field(description="kb/s, none where crf decides")
    preset: str
    audio_bitrate: int = Field(description="kb/s")
    colour: Colour


class Resolved(BaseModel):
    """A request with every choice made. Round trips through JSON exactly."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    task: Task
    prompt: str
    aspect_ratio: str = Field(description="for fl2va the sides of its first image")
    width: int
    height: int
    fps: int
    frames: int = Field(description="on the grid 17n + 5")
    seconds: float = Field(description="frames / 24, the duration of the video track")
    latent_frames: int
    latent_height: int
    latent_width: int
    audio_latents: int = Field(description="a channel")
    video_rows: int = Field(description="packed rows of the video, without text")
    audio_rows: int = Field(description="packed rows of both channels")
    references: tuple[Reference, ...] = Field(description="in packed order")
    condition_video_rows: int = Field(description="packed rows of the references' pictures")
    condition_audio_rows: int = Field(description="packed rows of both channels of the references' sounds")
    reference_order: ReferenceOrder
    reference_short_edge: int
    video_reference_short_edge: int
    keyframe_geometry: KeyframeGeometry
    condition_seed: int = Field(description="seed that the references' latents are drawn with, whatever the clip's")
    adapter: str | None = Field(description="what the model is changed by; null: nothing")
    forwards: int = Field(description="evaluations of the denoiser")
    sigma_points: int = Field(description="forwards + 1")
    positions: tuple[float, ...] | None = Field(
        description="of the sigma points before they are shifted, as a distilled model or an adapter pins them; null: "
        "equally spaced from 1 to 0"
    )
    video_shift: float
    audio_shift: float
    quality: Quality
    seed: int = Field(description="of the first output")
    outputs: int
    seed_convention: Literal["diffusers", "vllm-omni"]
    media: Media
    deadline: float | None = Field(description="seconds from arrival")
    notes: tuple[str, ...] = Field(description="what was raised, floored, overridden or has no effect")
    estimate: Estimate | None = Field(default=None, description="what a server says that the request will take")

    def parameters(self) -> dict[str, Any]:
        """Parameters that resolve to this request again (the notes apart), with nothing left to a default."""
        return {
            "task": self.task,
            # 362 frames are 15.083 s, what the longest legal duration is raised to.
            "duration": min(max(self.frames, 0), requested_frames(SECONDS_MAXIMUM)) / FRAMES_PER_SECOND,
            "width": self.width,
            "height": self.height,
            "num_inference_steps": self.forwards,
            "flow_shift": self.video_shift,
            "audio_flow_shift": self.audio_shift,
            "quality": self.quality.tier,
            "seed": self.seed,
            "seed_convention": self.seed_convention,
            "num_outputs_per_prompt": self.outputs,
            "reference_order": self.reference_order,
            "reference_short_edge": self.reference_short_edge,
            "video_reference_short_edge": self.video_reference_short_edge,
            "keyframe_geometry": self.keyframe_geometry,
            "media": self.media.model_dump(exclude_none=True),
            **({} if self.deadline is None else {"deadline": self.deadline}),
            **({} if self.adapter is None else {"lora": {"name": self.adapter}}),
            **self._ends(),
        }

    def _ends(self) -> dict[str, Any]:
        """What fl2va has instead of a ratio."""
        if self.task != "fl2va":
            return {"aspect_ratio": self.aspect_ratio}
        roles = tuple(one.role for one in self.references)
        return {"frame_indices": list(next((i for i, ends in KEYFRAME_INDICES.items() if ends == roles), ()))}

    def seeds(self) -> tuple[int, ...]:
        """The seed of each output."""
        return tuple(range(self.seed, self.seed + self.outputs))


def parse_prompt(raw: bytes | str) -> str:
    """The prompt, verbatim. Raises RequestError for invalid UTF-8, an empty prompt, or more than 7,000 characters."""
    text = _decode(PROMPT.name, raw)
    PROMPT.check(PROMPT.name, text)
    return text


def parse_params(raw: bytes | str) -> dict[str, Any]:
    """Strict JSON to a parameters object: no duplicate key, at most 64 KiB and 8 levels, what data: URLs hold apart.

    `resolve` checks the values.
    """
    text = _decode("parameters", raw)
    _check_size(text)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except json.JSONDecodeError as error:
        excerpt = text[max(0, error.pos - 20) : error.pos + 20]
        raise RequestError("parameters", excerpt, f"must be JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise RequestError("parameters", value, "must be a JSON object")
    return value


def resolve(
    prompt: bytes | str,
    params: Mapping[str, Any],
    dimensions: Dimensions,
    limits: Limits | None = None,
    media: Sequence[KnownFile] = (),
) -> Resolved:
    """Checks everything and makes every choice (spec: contract 1.4). Raises RequestError and nothing else.

    media: the request's files in packed order, as `selection.select` puts them.
    """
    text = parse_prompt(prompt)
    fields, limits = GivenFields(params), limits or Limits()
    _check_model(fields, limits)
    bound = bound_by(fields, limits.student, limits.adapters)
    kinds = [one.facts.kind for one in media]
    task = choose_task(fields.spelling("task"), fields.value("task"), kinds, limits.tasks)
    check_task(fields, task, bound)
    check_media(fields.spelling("task"), task, kinds)
    aspect_ratio = _aspect_ratio(fields, task, media)
    width, height = _canvas(fields, aspect_ratio)
    shape = Shape.of(width, height, _frames(fields, task, dimensions), dimensions)
    references = _references(fields, task, media, shape, dimensions)
    condition_rows = condition_rows_of(references, dimensions)
    sampled = sampling(fields, bound, dimensions)
    outputs = fields.value("num_outputs_per_prompt")
    fields.note_fields_of_others(task)
    return Resolved(
        task=task,
        prompt=text,
        aspect_ratio=aspect_ratio,
        fps=FRAMES_PER_SECOND,
        seconds=shape.frames / FRAMES_PER_SECOND,
        references=references,
        condition_video_rows=condition_rows[0],
        condition_audio_rows=condition_rows[1],
        reference_order=fields.value("reference_order"),
        reference_short_edge=fields.value("reference_short_edge"),
        video_reference_short_edge=fields.value("video_reference_short_edge"),
        keyframe_geometry=fields.value("keyframe_geometry"),
        condition_seed=CONDITION_SEED,
        adapter=fields.value("lora"),
        **sampled._asdict(),
        sigma_points=sampled.forwards + 1,
        quality=quality(_tier(fields, limits), sampled.forwards, sampled.video_shift, sampled.positions),
        seed=_seed(fields, outputs),
        outputs=outputs,
        seed_convention=fields.value("seed_convention"),
        media=_media(fields),
        deadline=fields.value("deadline"),
        notes=tuple(fields.notes),
        **dataclasses.asdict(shape),
    )


def restore(raw: bytes | str, dimensions: Dimensions, limits: Limits | None = None) -> Resolved:
    """A resolved request that came back over the wire, believed only as far as it resolves to itself again."""
    try:
        resolved = Resolved.model_validate_json(raw)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise RequestError("resolved", where, f"must be a resolved request: {error.errors()[0]['msg']}") from None
    media = [one.known(f"references[{place}]") for place, one in enumerate(resolved.references)]
    try:
        _check_media(media)
        again = resolve(resolved.prompt, resolved.parameters(), dimensions, limits, media)
    except RequestError as error:
        raise RequestError(f"resolved.{error.field}", error.value, error.rule, error.nearest) from None
    for name in Resolved.model_fields:
        given, expected = getattr(resolved, name), getattr(again, name)
        if given != expected and name not in ("notes", "estimate"):
            raise RequestError(f"resolved.{name}", given, "must agree with the rest of the request", expected)
    return resolved


def _check_media(media: Sequence[KnownFile]) -> None:
    """What is checked of files as they are taken in, as far as their facts tell."""
    for one in media:
        if not isinstance(one.facts, SoundFacts):
            check_sides(one.facts.width, one.facts.height, one.facts.kind, one.where)
        check_bytes(one.bytes, one.facts.kind, one.where)
    check_together([one.facts for one in media], [one.where for one in media])
    check_total([one.bytes for one in media], [one.where for one in media])


def check_total(sizes: Sequence[int], wheres: Sequence[str]) -> None:
    """Refuses files of more than MEDIA_BYTES together, naming the first that is too much. Raises RequestError."""
    for total, where in zip(itertools.accumulate(sizes), wheres, strict=True):
        if total > MEDIA_BYTES:
            rule = f"all files of a request must have at most {MEDIA_BYTES} bytes together"
            raise RequestError(where, f"{total} bytes", rule)


def _check_model(fields: GivenFields, limits: Limits) -> None:
    model = fields.given("model")
    if model is not None and model.value != limits.model:
        raise RequestError(model.spelling, model.value, "must be the served model", limits.model)


def _tier(fields: GivenFields, limits: Limits) -> Tier:
    """The tier that the request names, else the server's first."""
    given, offered = fields.given("quality"), {tier.name: tier for tier in limits.tiers}
    if given is None:
        return limits.tiers[0]
    name = cast(str, given.value)
    if name not in offered:
        why = (
            "forwards replaced by cached results" if name == CACHED_TIER else "a tier that this server's profile lacks"
        )
        raise RequestError(given.spelling, name, f"not offered ({why})", tuple(offered))
    return offered[name]


def _aspect_ratio(fields: GivenFields, task: Task, media: Sequence[KnownFile]) -> str:
    """The ratio that the canvas comes from: a name, or width:height of the first keyframe."""
    if task == "fl2va":
        first = media[0].facts
        assert isinstance(first, ImageFacts)  # the task takes images only
        return f"{first.width}:{first.height}"
    if task == "ref2va":
        asked = fields.value("aspect_ratio", DEFAULT_RATIO)
        if asked in AUTOMATIC:
            fields.notes.append(f"{fields.spelling('aspect_ratio')} {asked} is {DEFAULT_RATIO}")
        return DEFAULT_RATIO if asked in AUTOMATIC else cast(str, asked)
    ratio = cast(str, fields.required("aspect_ratio", task))
    if ratio in AUTOMATIC:
        rule = f"must be one of {', '.join(ASPECT_RATIOS)} for t2va"
        raise RequestError(fields.spelling("aspect_ratio"), ratio, rule)
    return ratio


def _references(
    fields: GivenFields, task: Task, media: Sequence[KnownFile], shape: Shape, dimensions: Dimensions
) -> tuple[Reference, ...]:
    """The media with every size decided."""
    roles: list[Role] = list(_keyframes(fields, len(media))) if task == "fl2va" else ["reference" for _ in media]
    edges = fields.value("reference_short_edge"), fields.value("video_reference_short_edge")
    target = Target(shape.width, shape.height, shape.frames, *edges)
    return tuple(reference(one, role, target, dimensions) for one, role in zip(media, roles, strict=True))


def _keyframes(fields: GivenFields, images: int) -> Sequence[Keyframe]:
    """Which end of the clip each image of fl2va is."""
    indices = fields.value("frame_indices", (0, -1)[:images])
    if len(indices) != images:
        nearest = tuple(str(list(legal)) for legal in KEYFRAME_INDICES if len(legal) == images)
        rule = f"must have one entry for each image, and there are {counted(images, 'image')}"
        raise RequestError(fields.spelling("frame_indices"), list(indices), rule, nearest)
    return KEYFRAME_INDICES[indices]


def _media(fields: GivenFields) -> Media:
    """The options of the MP4, with one of crf and video_bitrate."""
    chosen = {name: fields.value(name) for name in Media.model_fields}
    rate = fields.given("video_bitrate")
    if rate is not None and fields.given("crf") is not None:
        rule = f"must not stand beside {fields.spelling('crf')}: one of the two decides the size"
        raise RequestError(rate.spelling, rate.value, rule)
    return Media(**chosen | ({} if rate is None else {"crf": None}))


def _seed(fields: GivenFields, outputs: int) -> int:
    """The first seed, checked so that the last one is legal too."""
    seed, kind = fields.value("seed"), FIELD["seed"].kind
    assert isinstance(kind, Integer)
    if seed > kind.maximum - outputs + 1:
        rule = f"must leave room for seed + i of {outputs} outputs"
        raise RequestError(fields.spelling("seed"), seed, rule, kind.maximum - outputs + 1)
    return cast(int, seed)


def _frames(fields: GivenFields, task: Task, dimensions: Dimensions) -> int:
    """Frames on the grid, from the duration, the seconds, the frame count or the default, in this order."""
    names = ["duration", "seconds", "num_frames"]
    if fields.value("num_frames") == 1:
        fields.notes.append("num_frames 1 counts as not given")
        names.remove("num_frames")
    chosen = fields.first(*names)
    if chosen is None:
        fields.notes.append(f"no duration given: {DEFAULT_FRAMES[task]} frames")
        return DEFAULT_FRAMES[task]
    asked: Any = chosen.value
    frames = asked if chosen.field.name == "num_frames" else requested_frames(asked)
    legal = grid_frames(frames, dimensions.video_vae)
    if legal != frames:
        fields.notes.append(f"{chosen.spelling} {show(asked)} is {frames} frames, raised to {legal} (17n + 5)")
    return legal


def _canvas(fields: GivenFields, aspect_ratio: str) -> tuple[int, int]:
    """(width, height): the explicit sides, else the canvas of the ratio."""
    short_edge = fields.given("short_edge")
    sides = _sides(fields)
    if sides is None:
        if short_edge is not None and short_edge.value != SHORT_EDGE:
            rule = (
                f"must be {SHORT_EDGE} when the canvas comes from aspect_ratio; for another size give width and height"
            )
            raise RequestError(short_edge.spelling, short_edge.value, rule, SHORT_EDGE)
        return canvas_of(ratio_of(aspect_ratio))
    if short_edge is not None:
        fields.notes.append(f"{short_edge.spelling} has no effect beside explicit sides")
    width, height = sides
    given = fields.given("aspect_ratio") is not None
    if given and not math.isclose(width / height, ratio_of(aspect_ratio), rel_tol=1e-9):
        fields.notes.append(f"aspect_ratio {aspect_ratio} gives way to {width}x{height}")
    return width, height


def _sides(fields: GivenFields) -> tuple[int, int] | None:
    """The explicit (width, height) on the 32 px grid, or None."""
    explicit = _explicit(fields)
    if explicit is None:
        return None
    width, height = (_on_grid(fields, *one) for one in explicit)
    if not 1 / SIDE_RATIO_MAXIMUM <= width / height <= SIDE_RATIO_MAXIMUM:
        narrowest = math.ceil(height / SIDE_RATIO_MAXIMUM / SIDE_MULTIPLE) * SIDE_MULTIPLE
        nearest = min(max(width, narrowest), height * SIDE_RATIO_MAXIMUM)
        rule = f"width : height must be from 1:{SIDE_RATIO_MAXIMUM} to {SIDE_RATIO_MAXIMUM}:1"
        raise RequestError(explicit[0][0], f"{width}x{height}", rule, f"{nearest}x{height}")
    return width, height


def _explicit(fields: GivenFields) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """((spelling, width), (spelling, height)) as given, or None when neither is."""
    size = fields.first("size", "width", "height") if fields.given("size") else None
    if size is not None:
        width, height = cast(tuple[int, int], size.value)
        return (size.spelling, width), (size.spelling, height)
    across, down = fields.given("width"), fields.given("height")
    if across is None and down is None:
        return None
    if across is None or down is None:
        lone, absent = (across, "height") if across else (down, "width")
        raise RequestError(absent, MISSING, f"{cast(Given, lone).spelling} needs it beside it: give both or neither")
    return (across.spelling, cast(int, across.value)), (down.spelling, cast(int, down.value))


def _on_grid(fields: GivenFields, spelling: str, side: int) -> int:
    below = side // SIDE_MULTIPLE * SIDE_MULTIPLE
    if below == side:
        return side
    if not fields.value("snap"):
        rule = f"a side must be a multiple of {SIDE_MULTIPLE} ({side} is not), or send snap: true to floor it"
        raise RequestError(spelling, side, rule, (below, below + SIDE_MULTIPLE))
    fields.notes.append(f"{spelling} {side} floored to {below}")
    return below


def _decode(field: str, raw: bytes | str) -> str:
    if isinstance(raw, str):
        if not is_unicode(raw):
            raise RequestError(field, raw, "must be valid Unicode, without lone surrogates")
        return raw
    try:
        return bytes(raw).decode("utf-8")
    except UnicodeDecodeError as error:
        around = bytes(raw)[max(0, error.start - 8) : error.start + 8]
        raise RequestError(field, around, f"must be UTF-8, byte {error.start} is not") from None


def _check_size(text: str) -> None:
    written = len(text.encode("utf-8"))
    if written > _WRITTEN_BYTES:
        rule = f"must be at most {_WRITTEN_BYTES} bytes of JSON, data: URLs included"
        raise RequestError("parameters", written, rule)
    text = _DATA_URL.sub('""', text)
    size = len(text.encode("utf-8"))
    if size > PARAMETERS_BYTES:
        raise RequestError("parameters", size, f"must be at most {PARAMETERS_BYTES} bytes of JSON without data: URLs")
    depth = deepest = 0
    # Counted before parsing, because the parser recurses: brackets outside strings. A string may be unterminated: were
    # that no match, the search would begin again at each of its quotes.
    for bracket in re.findall(r"[\[{}\]]", re.sub(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', "", text, flags=re.DOTALL)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > PARAMETERS_DEPTH:
        raise RequestError("parameters", deepest, f"must be nested at most {PARAMETERS_DEPTH} levels deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RequestError(key, value, "given twice in one JSON object")
        found[key] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > _INTEGER_DIGITS:
        raise RequestError("parameters", digits, f"an integer must have at most {_INTEGER_DIGITS} digits")
    return int(digits)
