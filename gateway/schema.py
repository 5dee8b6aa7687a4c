"""The half of the OpenAPI document that the request contract gives: bodies of requests, and the answers there are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from typing import Any

from pydantic import BaseModel

from gateway.errors import Code
from gateway.form import FILE_FIELDS, FIRST, INPUT, INPUTS, LAST, PRIORITY
from gateway.job import MEDIA_TYPE, VideoJob
from gateway.progress import LAST_ID
from runtime.adapter_kind import NAME, NAMES, SCALES, AdapterName
from runtime.contract import EXTRA, FIELDS, GROUPS, PROMPT, Field
from runtime.kinds import AspectRatio, Boolean, Choice, Integer, Kind, Number, Sides, Step, Text, WholeSeconds
from runtime.reference_kinds import KEYFRAME_INDICES, START, FrameIndices, MediaUrls, NamedReferences, StartTimes

Schema = dict[str, Any]


class ErrorDetail(BaseModel):
    """What went wrong. field: the one that it is about, null where it is about none."""

    code: Code
    message: str
    field: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


@singledispatch
def schema_of(kind: Kind) -> Schema:
    """The JSON schema of a kind of value."""
    return {}


@schema_of.register
def _(kind: Integer) -> Schema:
    within = {"type": "integer", "minimum": kind.minimum, "maximum": kind.maximum}
    return {"anyOf": [within, {"enum": list(kind.exempt)}]} if kind.exempt else within


@schema_of.register
def _(kind: Step) -> Schema:
    return {"type": "integer", "enum": list(kind.values)}


@schema_of.register
def _(kind: Number) -> Schema:
    return {"type": "number", "minimum": kind.minimum, "maximum": kind.maximum}


@schema_of.register
def _(kind: Boolean) -> Schema:
    return {"type": "boolean"}


@schema_of.register
def _(kind: Text) -> Schema:
    return {"type": "string", "minLength": kind.minimum, "maxLength": kind.maximum}


@schema_of.register
def _(kind: Choice) -> Schema:
    return {"type": "string", "enum": list(kind.values)}


@schema_of.register
def _(kind: WholeSeconds) -> Schema:
    digits = [str(seconds) for seconds in range(kind.minimum, kind.maximum + 1)]
    return {"anyOf": [{"type": "integer", "minimum": kind.minimum, "maximum": kind.maximum}, {"enum": digits}]}


@schema_of.register
def _(kind: Sides) -> Schema:
    return {"type": "string", "pattern": "^[0-9]{1,9}x[0-9]{1,9}$", "examples": ["1344x768"]}


@schema_of.register
def _(kind: AspectRatio) -> Schema:
    return {"anyOf": [{"type": "string"}, {"type": "number"}], "examples": list(kind.names)}


@schema_of.register
def _(kind: NamedReferences) -> Schema:
    index = {"type": "integer", "minimum": 0}
    item = {"type": {"enum": ["image", "video", "audio"]}, "index": index, "url": {"type": "string"}}
    properties = item | {"start_time_seconds": schema_of(START)}
    return {
        "type": "array",
        "maxItems": kind.maximum,
        "items": {"type": "object", "properties": properties, "required": ["type"], "additionalProperties": False},
    }


@schema_of.register
def _(kind: MediaUrls) -> Schema:
    properties = {kind.key: {"type": "string", "minLength": 1}}
    item = {"type": "object", "properties": properties, "required": [kind.key], "additionalProperties": False}
    return {"anyOf": [item, {"type": "array", "items": item, "maxItems": kind.maximum}]}


@schema_of.register
def _(kind: StartTimes) -> Schema:
    return {"anyOf": [schema_of(START), {"type": "array", "items": schema_of(START), "maxItems": kind.maximum}]}


@schema_of.register
def _(kind: AdapterName) -> Schema:
    scale = {"type": "number", "enum": [1]}
    properties = {**{name: schema_of(NAME) for name in NAMES}, **dict.fromkeys(SCALES, scale)}
    named = [{"required": [name]} for name in NAMES]
    return {"type": "object", "properties": properties, "oneOf": named, "additionalProperties": False}


@schema_of.register
def _(kind: FrameIndices) -> Schema:
    return {"enum": [0, -1, *(list(indices) for indices in KEYFRAME_INDICES)]}


def _field(field: Field) -> Schema:
    schema = schema_of(field.kind) if field.only is None else {"enum": list(field.only)}
    return {**schema, "description": field.meaning}


def _paths() -> Iterator[tuple[str, Field]]:
    """Every path of a field that some value is taken for."""
    for field in FIELDS:
        if field.only != ():
            yield from ((path, field) for path in field.spellings)


def _parameters() -> dict[str, Schema]:
    """The properties of the parameters object, without those of `extra_params`."""
    plain = {path: _field(field) for path, field in _paths() if "." not in path}
    for group in GROUPS:
        inner = {path.partition(".")[2]: _field(field) for path, field in _paths() if path.startswith(f"{group}.")}
        plain[group] = {"type": "object", "properties": inner, "additionalProperties": False}
    return plain


def _body(files: dict[str, Schema]) -> Schema:
    parameters = _parameters()
    extra = {"type": "object", "properties": parameters, "additionalProperties": False}
    return {
        "type": "object",
        "properties": {
            PROMPT.name: _field(PROMPT),
            PRIORITY.name: _field(PRIORITY),
            **parameters,
            EXTRA: extra,
            **files,
        },
        "required": [PROMPT.name],
        "additionalProperties": False,
    }


_FILE: Schema = {"type": "string", "format": "binary"}
_FILES: dict[str, Schema] = {
    INPUT: {**_FILE, "description": "one image, video or sound"},
    INPUTS: {"type": "array", "items": _FILE, "description": "several of them, in the order in which they are read"},
    FIRST: {**_FILE, "description": "an image that is the first frame"},
    LAST: {**_FILE, "description": "an image that is the last frame"},
}
assert set(_FILES) == set(FILE_FIELDS)

_EXAMPLE = {
    "prompt": "A red fox runs over fresh snow, its steps crunching.",
    "aspect_ratio": "1:1",
    "size": "256x256",
    "seconds": 4,
    "num_inference_steps": 2,
}

REQUEST_BODY: Schema = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _body({}), "example": _EXAMPLE},
            "multipart/form-data": {"schema": _body(_FILES)},
        },
    }
}
"""What a request for a clip may be."""

_REFUSALS = (400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504, 507)
_STREAMED: Schema = {"schema": {"type": "string", "format": "binary"}}
_CLIPS: Schema = {"content": {MEDIA_TYPE: _STREAMED, "application/zip": _STREAMED}}
_EVENT: Schema = {
    "type": "object",
    "properties": {
        "event": {"enum": ["progress", "status"]},
        "id": {"type": "string", "pattern": f"^([0-9]+|{LAST_ID})$"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "required": ["event", "id", "data"],
}
_LINKS: Schema = {
    operation: {"operationId": operation, "parameters": {"job_id": "$response.body#/id"}}
    for operation in ("job", "delete", "content", "events")
}
_ANSWERS: dict[str, tuple[dict[int, Schema], tuple[int, ...]]] = {
    "create": ({200: {"links": _LINKS}}, (*_REFUSALS, 409)),
    "create_and_wait": ({200: _CLIPS}, (*_REFUSALS, 409)),
    "dry_run": ({}, _REFUSALS),
    "list_jobs": ({}, (400, 401, 403)),
    "job": (
        {status: {"model": VideoJob | ErrorAnswer} for status in (400, 409, 422, 429, 500, 503, 504, 507)},
        (401, 403, 404),
    ),
    "delete": ({}, (400, 401, 403, 404, 409)),
    "content": (
        {
            200: _CLIPS,
            206: {"content": {MEDIA_TYPE: _STREAMED, "multipart/byteranges": _STREAMED}},
            # What is wrong with a Range header, Starlette tells in its own words.
            400: {"model": ErrorAnswer, "content": {"text/plain": {"schema": {"type": "string"}}}},
            416: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        },
        (401, 403, 404, 422),
    ),
    "events": (
        {200: {"content": {"text/event-stream": {"schema": _EVENT}}}, 204: {}},
        (400, 401, 403, 404),
    ),
}


def without_defaults(document: Schema) -> Schema:
    """The document without the refusal that FastAPI adds to every route with parameters: here that is a 400."""
    for methods in document["paths"].values():
        for operation in methods.values():
            schema = operation["responses"].get("422", {}).get("content", {}).get("application/json", {}).get("schema")
            if schema is not None and schema.get("$ref", "").endswith("/HTTPValidationError"):
                del operation["responses"]["422"]
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused, None)
    return document


def refusals(*statuses: int) -> dict[int | str, Schema]:
    """Answers with the envelope of errors, as FastAPI takes them."""
    return {status: {"model": ErrorAnswer, "description": "refused"} for status in statuses}


def answers(operation: str) -> dict[int | str, Schema]:
    """The answers of an operation beside its plain success, as FastAPI takes them."""
    special, errors = _ANSWERS[operation]
    found: dict[int | str, Schema] = {status: {"description": "", **schema} for status, schema in special.items()}
    return found | refusals(*errors)
