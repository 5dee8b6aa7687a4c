"""What the fields of a form mean: their texts become the parameters object, their files its media.

Values are not checked here. A text that is not of its field's type goes to the models as it is, whose refusal names the
field, the value and the rule.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from gateway.errors import ApiError, Code
from gateway.models import Asked
from gateway.multipart import Part
from runtime.contract import EXTRA, FIELD, GROUPS, MEDIA_BYTES, PARAMETERS_BYTES, PROMPT, PROMPT_CHARACTERS, Field
from runtime.kinds import AspectRatio, Choice, Integer, Sides, Text, WholeSeconds
from runtime.media.facts import Kind as MediaKind
from runtime.media.formats import format_of
from runtime.media.limits import LIMITS
from runtime.reference_kinds import MEDIA_KINDS
from runtime.refusal import RequestError
from runtime.request import parse_params
from triton_repo.names import HIGH, NORMAL

INPUT, INPUTS = "input_reference", "input_references"
FIRST, LAST = "first_frame", "last_frame"
FILE_FIELDS = (INPUT, INPUTS, FIRST, LAST)
"""The fields that are files. INPUTS may be given several times."""

PRIORITY = Field(
    "priority",
    Integer(HIGH, NORMAL),
    f"{HIGH}: before all jobs that have {NORMAL}; of a job, and no key of the parameters",
    NORMAL,
)

EXCLUSIVE = (
    (INPUTS, (INPUT, "image_reference", "video_reference")),
    (INPUT, ("image_reference", "video_reference")),
    (FIRST, (INPUT, INPUTS, "image_reference", "video_reference", "references", "frame_indices")),
    (LAST, (INPUT, INPUTS, "image_reference", "video_reference", "references", "frame_indices")),
)
"""Fields, each with those that cannot stand beside it."""

_TEXTS = (AspectRatio, Choice, Sides, Text, WholeSeconds)
"""Kinds whose values are texts as they are; those of the others are JSON."""

_WITH_URLS = (EXTRA, "references", *(f"{kind}_reference" for kind in MEDIA_KINDS))
"""Fields whose text may hold data: URLs, and so whole files."""

_TEXT_BYTES = 4 * PROMPT_CHARACTERS


def admit(part: Part, same: int) -> int:
    """The bytes that a part may have, of which `same` of the same name came before. Raises ApiError."""
    if same and part.name != INPUTS:
        raise ApiError(Code.INVALID, f"{part.name}: given twice", part.name)
    if part.name in FILE_FIELDS:
        if not part.is_file:
            raise ApiError(Code.INVALID, f"{part.name}: must be a file, with a file name", part.name)
        kind = _declared_kind(part)
        return MEDIA_BYTES if kind is None else LIMITS[kind].bytes_maximum
    if part.is_file and part.name in (*FIELD, *GROUPS, EXTRA, PROMPT.name):
        raise ApiError(Code.INVALID, f"{part.name}: must be text, not a file", part.name)
    if part.is_file:
        rule = f"unknown field; files are sent as {', '.join(FILE_FIELDS)}"
        raise ApiError(Code.INVALID, f"{part.name}: {rule}", part.name)
    if part.name in _WITH_URLS:
        return MEDIA_BYTES
    return PARAMETERS_BYTES if part.name in GROUPS else _TEXT_BYTES


def asked_of_form(parts: Sequence[Part]) -> Asked:
    """The request that a form stands for. Raises ApiError."""
    texts = {part.name: _text(part) for part in parts if not part.is_file}
    files = [part for part in parts if part.is_file]
    given = {part.name for part in parts}
    for name, others in EXCLUSIVE:
        beside = next((other for other in others if name in given and other in given), None)
        if beside is not None:
            raise ApiError(Code.INVALID, f"{beside}: not beside {name}; give one of the two", beside)
    prompt = texts.pop(PROMPT.name, None)
    params = {name: value_of(name, text) for name, text in texts.items()}
    media, named = _media(files)
    priority = priority_of(params.pop(PRIORITY.name, PRIORITY.default))
    return Asked(prompt_of(prompt), {**_order(files, named, given), **params}, media, priority)


def asked_of_json(body: bytes) -> Asked:
    """The request that a JSON object stands for: the parameters object, with the prompt in it. Raises ApiError."""
    try:
        params = parse_params(body)
    except RequestError as error:
        raise refused(error) from None
    priority = priority_of(params.pop(PRIORITY.name, PRIORITY.default))
    return Asked(prompt_of(params.pop(PROMPT.name, None)), params, {}, priority)


def prompt_of(value: object) -> str:
    """The prompt. Raises ApiError."""
    if value is None:
        raise ApiError(Code.INVALID, f"{PROMPT.name}: missing; {PROMPT.kind.rule}", PROMPT.name)
    try:
        return str(PROMPT.check(PROMPT.name, value))
    except RequestError as error:
        raise refused(error) from None


def priority_of(value: object) -> int:
    """How urgent a request is. Raises ApiError."""
    try:
        return int(str(PRIORITY.check(PRIORITY.name, value)))
    except RequestError as error:
        raise refused(error) from None


def value_of(name: str, text: str) -> object:
    """A field's text as the value that it stands for; the text itself where it stands for none."""
    if name in FIELD and isinstance(FIELD[name].kind, _TEXTS):
        return text
    try:
        parsed = parse_params(f'{{"value": {text}}}')
    except RequestError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def refused(error: RequestError) -> ApiError:
    """A refusal by the request contract."""
    return ApiError(Code.INVALID, str(error), error.field)


def _text(part: Part) -> str:
    try:
        return part.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(Code.INVALID, f"{part.name}: must be UTF-8, byte {error.start} is not", part.name) from None


def _declared_kind(part: Part) -> MediaKind | None:
    """What the type of a file, else the end of its name, says that it is."""
    guessed = mimetypes.guess_type(part.file_name or "")[0] or ""
    for declared in (part.content_type, guessed):
        family = declared.partition("/")[0]
        if family in get_args(MediaKind):
            return next(kind for kind in MEDIA_KINDS if kind == family)
    return None


def _kind(part: Part) -> MediaKind:
    """What a file is, by its type, its name or its first bytes. Raises ApiError."""
    found = _declared_kind(part)
    if found is None:
        known = format_of(bytes(part.data[:64]))
        found = next((kind for kind in MEDIA_KINDS if known in LIMITS[kind].formats), None)
    if found is None:
        legal = "; ".join(f"{kind}: {LIMITS[kind].formats_text}" for kind in MEDIA_KINDS)
        raise ApiError(Code.INVALID, f"{part.name}: got {part.content_type or 'no type'}; must be {legal}", part.name)
    if part.name in (FIRST, LAST) and found != "image":
        raise ApiError(Code.INVALID, f"{part.name}: got a file of type {found}; must be an image", part.name)
    return found


def _media(files: Sequence[Part]) -> tuple[dict[MediaKind, list[bytes]], list[dict[str, Any]]]:
    """The files by kind, and how `references` names them in the order in which they came."""
    media: dict[MediaKind, list[bytes]] = {}
    named: list[dict[str, Any]] = []
    for part in sorted(files, key=lambda one: one.name == LAST):
        elements = media.setdefault(_kind(part), [])
        named.append({"type": _kind(part), "index": len(elements)})
        elements.append(bytes(part.data))
    return media, named


def _order(files: Sequence[Part], named: Sequence[Mapping[str, Any]], given: set[str]) -> dict[str, Any]:
    """What the files say of the parameters: the order in which the model reads them, the ends of the clip they are."""
    frames = [index for name, index in ((FIRST, 0), (LAST, -1)) if name in given]
    if frames:
        return {"task": "fl2va", "frame_indices": frames}
    by_url = any(f"{kind}_reference" in given for kind in MEDIA_KINDS)
    return {"references": list(named)} if files and not by_url else {}
