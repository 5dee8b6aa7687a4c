"""Kinds of request values that name reference media: which file or URL, from when on, at which end of the clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from runtime.kinds import Number, is_unicode
from runtime.media.facts import Kind
from runtime.refusal import MISSING, RequestError

MEDIA_KINDS: tuple[Kind, ...] = get_args(Kind)

INPUTS: Mapping[Kind, str] = {"image": "IMAGES", "video": "VIDEOS", "audio": "AUDIOS"}
"""The input whose elements are the files of a kind."""

START = Number(0, 86_400, "seconds")
"""A start time. The file itself says how late it may be; this keeps the arithmetic finite."""

Keyframe = Literal["first", "last"]

Role = Literal["first", "last", "reference"]
"""What a condition is to the clip: its first frame, its last frame, or something to refer to."""

ReferenceOrder = Literal["as_sent", "by_type"]
"""as_sent (diffusers): in the order of the request. by_type (vllm-omni): images, videos, sounds."""

KEYFRAME_INDICES: Mapping[tuple[int, ...], tuple[Keyframe, ...]] = {
    (0,): ("first",),
    (-1,): ("last",),
    (0, -1): ("first", "last"),
}
"""Which ends of the clip the images of fl2va are, by the legal values of frame_indices."""


@dataclass(frozen=True)
class Named:
    """One reference as the parameters name it: element `index` of its kind's input, or what `url` leads to."""

    kind: Kind
    spelling: str
    index: int | None = None
    url: str | None = None
    start_time_seconds: float | None = None


@dataclass(frozen=True)
class NamedReferences:
    """The list `references`: objects with `type` and one of `index` and `url`; a video's may have a start time."""

    maximum: int
    type_name = "list of objects"

    @property
    def range_text(self) -> str:
        return (
            f'at most {self.maximum} of `{{"type": "image", "video" or "audio"; "index": n or "url": "..."}}`, '
            "a video also with `start_time_seconds`"
        )

    @property
    def rule(self) -> str:
        return f"must be a list of at most {self.maximum} objects with type and one of index and url"

    def check(self, spelling: str, value: object) -> tuple[Named, ...]:
        if type(value) is not list or len(value) > self.maximum:
            raise RequestError(spelling, value, self.rule)
        return tuple(self._item(f"{spelling}[{place}]", item) for place, item in enumerate(value))

    def _item(self, spelling: str, item: object) -> Named:
        if not isinstance(item, Mapping):
            raise RequestError(spelling, item, "must be an object with type and one of index and url")
        kind = item.get("type", MISSING)
        if type(kind) is not str or kind not in MEDIA_KINDS:
            raise RequestError(f"{spelling}.type", kind, f"must be one of {', '.join(MEDIA_KINDS)}")
        legal = ("type", "index", "url", *(("start_time_seconds",) if kind == "video" else ()))
        _refuse_others(spelling, item, legal)
        if ("index" in item) == ("url" in item):
            raise RequestError(spelling, item, "must have exactly one of index and url")
        start = START.check(f"{spelling}.start_time_seconds", item["start_time_seconds"]) if len(item) > 2 else None
        if "url" in item:
            return Named(kind, spelling, url=_url(f"{spelling}.url", item["url"]), start_time_seconds=start)
        index = item["index"]
        if type(index) is not int or not 0 <= index < self.maximum:
            raise RequestError(f"{spelling}.index", index, f"must be an element of {INPUTS[kind]}, counted from 0")
        return Named(kind, spelling, index=index, start_time_seconds=start)


@dataclass(frozen=True)
class MediaUrls:
    """One object with a URL, or a list of them, as `image_reference` and its like are written."""

    kind: Kind
    maximum: int
    type_name = "object, or a list of them"

    @property
    def range_text(self) -> str:
        return f'`{{"{self.key}": "..."}}`, or a list of at most {self.maximum} of them'

    @property
    def rule(self) -> str:
        return f"must be an object with the key {self.key}, or a list of at most {self.maximum} of them"

    @property
    def key(self) -> str:
        """The one key of an object."""
        return f"{self.kind}_url"

    def check(self, spelling: str, value: object) -> tuple[Named, ...]:
        if isinstance(value, Mapping):
            return (self._item(spelling, value),)
        if type(value) is not list or len(value) > self.maximum:
            raise RequestError(spelling, value, self.rule)
        return tuple(self._item(f"{spelling}[{place}]", item) for place, item in enumerate(value))

    def _item(self, spelling: str, item: object) -> Named:
        if not isinstance(item, Mapping):
            raise RequestError(spelling, item, self.rule)
        if "file_id" in item:
            raise RequestError(f"{spelling}.file_id", item["file_id"], "not offered (files that were uploaded before)")
        _refuse_others(spelling, item, (self.key,))
        return Named(self.kind, spelling, url=_url(f"{spelling}.{self.key}", item.get(self.key, MISSING)))


@dataclass(frozen=True)
class StartTimes:
    """Seconds into a video: one number for all of them, or a list with one for each; returned as float or tuple."""

    maximum: int
    type_name = "number, or a list of them"

    @property
    def range_text(self) -> str:
        return f"{START.range_text}, or a list with one for each video"

    @property
    def rule(self) -> str:
        return f"must be a number, from {START.range_text}, or a list of at most {self.maximum} of them"

    def check(self, spelling: str, value: object) -> float | tuple[float, ...]:
        if type(value) is list and len(value) <= self.maximum:
            return tuple(START.check(f"{spelling}[{place}]", item) for place, item in enumerate(value))
        if type(value) not in (int, float):
            raise RequestError(spelling, value, self.rule)
        return START.check(spelling, value)


@dataclass(frozen=True)
class FrameIndices:
    """Which frames the images of fl2va are: 0, the first, and -1, the last; returned as a tuple."""

    type_name = "integer, or a list of them"
    range_text = "0, -1, [0], [-1], [0, -1]"
    rule = f"must be one of {range_text}"

    def check(self, spelling: str, value: object) -> tuple[int, ...]:
        listed = value if type(value) is list else [value]
        if all(type(one) is int for one in listed) and tuple(listed) in KEYFRAME_INDICES:
            return tuple(listed)
        raise RequestError(spelling, value, self.rule)


def _refuse_others(spelling: str, item: Mapping[object, object], legal: tuple[str, ...]) -> None:
    for key, value in item.items():
        if key not in legal:
            raise RequestError(f"{spelling}.{key}", value, f"unknown key; must be one of {', '.join(legal)}")


def _url(spelling: str, value: object) -> str:
    if type(value) is not str or not value or "\0" in value or not is_unicode(value):
        raise RequestError(spelling, value, "must be a URL: data:, https: or http:, or a path under the media root")
    return cast(str, value)
