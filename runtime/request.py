"""From a prompt and a parameters object to a fully resolved request, or to one refusal.

No arithmetic and no choice is left to later stages.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plugins.dimensions import FRAMES_PER_SECOND, Dimensions
from plugins.shape import (
    SECONDS_MAXIMUM,
    SHORT_EDGE,
    SIDE_MULTIPLE,
    Shape,
    canvas,
    grid_frames,
    ratio_of,
    requested_frames,
)
from runtime.contract import (
    DEFAULT_FORWARDS,
    DEFAULT_FRAMES,
    EVALUATIONS,
    FIELD,
    PARAMETERS_BYTES,
    PARAMETERS_DEPTH,
    PROMPT,
    SIDE_RATIO_MAXIMUM,
    SIGMA_POINTS,
    Given,
    Status,
    occurrences,
)
from runtime.kinds import is_unicode
from runtime.refusal import MISSING, RequestError, show

__all__ = ["Limits", "Media", "RequestError", "Resolved", "parse_params", "parse_prompt", "resolve", "restore"]

_INTEGER_DIGITS = 1_000


class Limits(BaseModel):
    """What one server adds to the contract."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(default="h3", description="the name that the field `model` must equal")


class Media(BaseModel):
    """Options of the MP4."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    crf: int
    preset: str
    audio_bitrate: int = Field(description="kb/s")


class Resolved(BaseModel):
    """A request with every choice made. Round trips through JSON exactly."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    task: Literal["t2va"]
    prompt: str
    aspect_ratio: str
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
    forwards: int = Field(description="evaluations of the denoiser")
    sigma_points: int = Field(description="forwards + 1")
    video_shift: float
    audio_shift: float
    seed: int
    seed_convention: Literal["diffusers", "vllm-omni"]
    media: Media
    notes: tuple[str, ...] = Field(description="what was raised, floored, overridden or has no effect")

    def parameters(self) -> dict[str, Any]:
        """Parameters that resolve to this request again (the notes apart), with nothing left to a default."""
        return {
            "task": self.task,
            # 362 frames are 15.083 s, what the longest legal duration is raised to.
            "duration": min(max(self.frames, 0), requested_frames(SECONDS_MAXIMUM)) / FRAMES_PER_SECOND,
            "aspect_ratio": self.aspect_ratio,
            "width": self.width,
            "height": self.height,
            "num_inference_steps": self.forwards,
            "flow_shift": self.video_shift,
            "audio_flow_shift": self.audio_shift,
            "seed": self.seed,
            "seed_convention": self.seed_convention,
            "media": self.media.model_dump(),
        }


def parse_prompt(raw: bytes | str) -> str:
    """The prompt, verbatim. Raises RequestError for invalid UTF-8, an empty prompt, or more than 7,000 characters."""
    text = _decode(PROMPT.name, raw)
    PROMPT.check(PROMPT.name, text)
    return text


def parse_params(raw: bytes | str) -> dict[str, Any]:
    """Strict JSON to a parameters object: no duplicate key, at most 64 KiB, 8 levels. `resolve` checks the values."""
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
    prompt: bytes | str, params: Mapping[str, Any], dimensions: Dimensions, limits: Limits | None = None
) -> Resolved:
    """Checks everything and makes every choice (spec: contract 1.4). Raises RequestError and nothing else."""
    text = parse_prompt(prompt)
    request = _Request(params)
    _check_model(request, limits or Limits())
    aspect_ratio = request.required("aspect_ratio")
    width, height = _canvas(request, aspect_ratio)
    shape = Shape.of(width, height, _frames(request, dimensions), dimensions)
    forwards = _forwards(request)
    return Resolved(
        task=request.value("task"),
        prompt=text,
        aspect_ratio=aspect_ratio,
        fps=FRAMES_PER_SECOND,
        seconds=shape.frames / FRAMES_PER_SECOND,
        forwards=forwards,
        sigma_points=forwards + 1,
        video_shift=request.value("flow_shift", dimensions.video_shift),
        audio_shift=request.value("audio_flow_shift", dimensions.audio_shift),
        seed=request.value("seed"),
        seed_convention=request.value("seed_convention"),
        media=Media(**{name: request.value(name) for name in Media.model_fields}),
        notes=tuple(request.notes),
        **dataclasses.asdict(shape),
    )


def restore(raw: bytes | str, dimensions: Dimensions) -> Resolved:
    """A resolved request that came back over the wire, believed only as far as it resolves to itself again."""
    try:
        resolved = Resolved.model_validate_json(raw)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise RequestError("resolved", where, f"must be a resolved request: {error.errors()[0]['msg']}") from None
    try:
        again = resolve(resolved.prompt, resolved.parameters(), dimensions)
    except RequestError as error:
        raise RequestError(f"resolved.{error.field}", error.value, error.rule, error.nearest) from None
    for name in Resolved.model_fields:
        given, expected = getattr(resolved, name), getattr(again, name)
        if given != expected and name != "notes":
            raise RequestError(f"resolved.{name}", given, "must agree with the rest of the request", expected)
    return resolved


class _Request:
    """The fields that were given, one winner each, and the notes that the answer will carry."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        self._given: dict[str, Given] = {}
        for one in occurrences(parameters):
            self._admit(one)

    def _admit(self, one: Given) -> None:
        other = self._given.get(one.field.name, one)
        winner, loser = (one, other) if one.rank <= other.rank else (other, one)
        self._given[one.field.name] = winner
        if loser.value != winner.value:
            self._give_way(loser, winner)
        if one.field.status is Status.ACCEPTED:
            self.notes.append(f"{one.spelling} has no effect: {one.field.meaning}")

    def _give_way(self, loser: Given, winner: Given) -> None:
        self.notes.append(f"{loser.spelling} {show(loser.value)} gives way to {winner.spelling} {show(winner.value)}")

    def given(self, name: str) -> Given | None:
        return self._given.get(name)

    def value(self, name: str, default: Any = None) -> Any:
        """The given value, else `default`, else the table's default."""
        found = self._given.get(name)
        if found is not None:
            return found.value
        return FIELD[name].default if default is None else default

    def required(self, name: str) -> Any:
        found = self._given.get(name)
        if found is None:
            raise RequestError(name, MISSING, f"required for t2va; {FIELD[name].kind.rule}")
        return found.value

    def first(self, *names: str) -> Given | None:
        """The first field given; those after it give way, with a note."""
        found = [one for one in map(self.given, names) if one is not None]
        for loser in found[1:]:
            self._give_way(loser, found[0])
        return found[0] if found else None


def _check_model(request: _Request, limits: Limits) -> None:
    model = request.given("model")
    if model is not None and model.value != limits.model:
        raise RequestError(model.spelling, model.value, "must be the served model", limits.model)


def _frames(request: _Request, dimensions: Dimensions) -> int:
    """Frames on the grid, from the duration, the seconds, the frame count or the default, in this order."""
    names = ["duration", "seconds", "num_frames"]
    if request.value("num_frames") == 1:
        request.notes.append("num_frames 1 counts as not given")
        names.remove("num_frames")
    chosen = request.first(*names)
    if chosen is None:
        request.notes.append(f"no duration given: {DEFAULT_FRAMES} frames")
        return DEFAULT_FRAMES
    asked: Any = chosen.value
    frames = asked if chosen.field.name == "num_frames" else requested_frames(asked)
    legal = grid_frames(frames, dimensions.video_vae)
    if legal != frames:
        request.notes.append(f"{chosen.spelling} {show(asked)} is {frames} frames, raised to {legal} (17n + 5)")
    return legal


def _canvas(request: _Request, aspect_ratio: str) -> tuple[int, int]:
    """(width, height): the explicit sides, else the canvas of the ratio."""
    short_edge = request.given("short_edge")
    sides = _sides(request)
    if sides is None:
        if short_edge is not None and short_edge.value != SHORT_EDGE:
            rule = (
                f"must be {SHORT_EDGE} when the canvas comes from aspect_ratio; for another size give width and height"
            )
            raise RequestError(short_edge.spelling, short_edge.value, rule, SHORT_EDGE)
        return canvas(aspect_ratio)
    if short_edge is not None:
        request.notes.append(f"{short_edge.spelling} has no effect beside explicit sides")
    width, height = sides
    if not math.isclose(width / height, ratio_of(aspect_ratio), rel_tol=1e-9):
        request.notes.append(f"aspect_ratio {aspect_ratio} gives way to {width}x{height}")
    return width, height


def _sides(request: _Request) -> tuple[int, int] | None:
    """The explicit (width, height) on the 32 px grid, or None."""
    explicit = _explicit(request)
    if explicit is None:
        return None
    width, height = (_on_grid(request, *one) for one in explicit)
    if not 1 / SIDE_RATIO_MAXIMUM <= width / height <= SIDE_RATIO_MAXIMUM:
        narrowest = math.ceil(height / SIDE_RATIO_MAXIMUM / SIDE_MULTIPLE) * SIDE_MULTIPLE
        nearest = min(max(width, narrowest), height * SIDE_RATIO_MAXIMUM)
        rule = f"width : height must be from 1:{SIDE_RATIO_MAXIMUM} to {SIDE_RATIO_MAXIMUM}:1"
        raise RequestError(explicit[0][0], f"{width}x{height}", rule, f"{nearest}x{height}")
    return width, height


def _explicit(request: _Request) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """((spelling, width), (spelling, height)) as given, or None when neither is."""
    size = request.first("size", "width", "height") if request.given("size") else None
    if size is not None:
        width, height = cast(tuple[int, int], size.value)
        return (size.spelling, width), (size.spelling, height)
    across, down = request.given("width"), request.given("height")
    if across is None and down is None:
        return None
    if across is None or down is None:
        lone, absent = (across, "height") if across else (down, "width")
        raise RequestError(absent, MISSING, f"{cast(Given, lone).spelling} needs it beside it: give both or neither")
    return (across.spelling, cast(int, across.value)), (down.spelling, cast(int, down.value))


def _on_grid(request: _Request, spelling: str, side: int) -> int:
    below = side // SIDE_MULTIPLE * SIDE_MULTIPLE
    if below == side:
        return side
    if not request.value("snap"):
        rule = f"a side must be a multiple of {SIDE_MULTIPLE} ({side} is not), or send snap: true to floor it"
        raise RequestError(spelling, side, rule, (below, below + SIDE_MULTIPLE))
    request.notes.append(f"{spelling} {side} floored to {below}")
    return below


def _forwards(request: _Request) -> int:
    """Evaluations of the denoiser, from the count and the convention it is given in."""
    steps = request.given("num_inference_steps")
    if steps is None:
        return DEFAULT_FORWARDS
    points = request.value("step_convention") == "sigma_points"
    count = (SIGMA_POINTS if points else EVALUATIONS).check(steps.spelling, steps.value)
    return count - 1 if points else count


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
    size = len(text.encode("utf-8"))
    if size > PARAMETERS_BYTES:
        raise RequestError("parameters", size, f"must be at most {PARAMETERS_BYTES} bytes of JSON")
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
