"""Which media a request is about, in the order in which the model reads them; nothing is fetched or opened here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from runtime.given import GivenFields
from runtime.media.facts import Kind
from runtime.reference_kinds import INPUTS, MEDIA_KINDS, Named, ReferenceOrder
from runtime.refusal import MISSING, RequestError
from runtime.task import Task, check_media, choose_task, counted


@dataclass(frozen=True)
class Wanted:
    """One medium: element `index` of its kind's input, or what `url` leads to. `where` is how errors name it."""

    kind: Kind
    where: str
    index: int | None
    url: str | None
    start_time_seconds: float


def select(fields: GivenFields, files: Mapping[Kind, int], served: Sequence[Task]) -> tuple[Wanted, ...]:
    """The media of a request in packed order.

    files: how many elements the input of each kind has. served: the tasks of this server. Raises RequestError when the
    task does not take them.
    """
    named = _named(fields, files)
    kinds = [one.kind for one in named]
    task = choose_task(fields.spelling("task"), fields.value("task"), kinds, served)
    check_media(fields.spelling("task"), task, kinds)
    wanted = [
        Wanted(one.kind, one.spelling, one.index, one.url, start)
        for one, start in zip(named, _starts(fields, named), strict=True)
    ]
    return tuple(wanted[place] for place in packed_order(kinds, fields.value("reference_order")))


def packed_order(kinds: Sequence[Kind], order: ReferenceOrder) -> list[int]:
    """The places of the references in the order in which the model reads them."""
    places = range(len(kinds))
    if order == "as_sent":
        return list(places)
    return sorted(places, key=lambda place: MEDIA_KINDS.index(kinds[place]))


def _named(fields: GivenFields, files: Mapping[Kind, int]) -> tuple[Named, ...]:
    listed = fields.given("references")
    if listed is None or not listed.value:
        return tuple(_by_kind(fields, files))
    for other in filter(None, (fields.given(f"{kind}_reference") for kind in MEDIA_KINDS)):
        urls = cast(tuple[Named, ...], other.value)
        if urls:
            rule = f"not beside {listed.spelling}: give one of the two"
            raise RequestError(other.spelling, f"{len(urls)} of them", rule)
    named = cast(tuple[Named, ...], listed.value)
    _check_elements(listed.spelling, named, files)
    return named


def _by_kind(fields: GivenFields, files: Mapping[Kind, int]) -> Iterator[Named]:
    """All files and URLs: images, then videos, then sounds."""
    for kind in MEDIA_KINDS:
        for index in range(files.get(kind, 0)):
            yield Named(kind, f"{INPUTS[kind]}[{index}]", index=index)
        yield from cast(tuple[Named, ...], fields.value(f"{kind}_reference", ()))


def _check_elements(spelling: str, named: Sequence[Named], files: Mapping[Kind, int]) -> None:
    """Every file is named once: one that is not would be ignored."""
    used: set[tuple[Kind, int]] = set()
    for one in named:
        if one.index is None:
            continue
        if one.index >= files.get(one.kind, 0):
            rule = f"{INPUTS[one.kind]} has {counted(files.get(one.kind, 0), one.kind)}, counted from 0"
            raise RequestError(f"{one.spelling}.index", one.index, rule)
        if (one.kind, one.index) in used:
            raise RequestError(f"{one.spelling}.index", one.index, "named twice; send the file twice to use it twice")
        used.add((one.kind, one.index))
    for kind in MEDIA_KINDS:
        for index in range(files.get(kind, 0)):
            if (kind, index) not in used:
                raise RequestError(spelling, MISSING, f"{INPUTS[kind]}[{index}] is not in it; name every file once")


def _starts(fields: GivenFields, named: Sequence[Named]) -> list[float]:
    """The start time of each medium, 0 for images and sounds."""
    videos = [one for one in named if one.kind == "video"]
    field = fields.given("start_time_seconds")
    own = next((one for one in videos if one.start_time_seconds is not None), None)
    if field is None or field.value in (0.0, ()):
        return [one.start_time_seconds or 0.0 for one in named]
    if own is not None:
        rule = f"not beside {own.spelling}.start_time_seconds: give one of the two"
        raise RequestError(field.spelling, field.value, rule)
    starts = cast(tuple[float, ...], field.value if isinstance(field.value, tuple) else (field.value,) * len(videos))
    if not videos or len(starts) != len(videos):
        rule = f"must be one number, or one for each video, and there are {counted(len(videos), 'video')}"
        raise RequestError(field.spelling, field.value, rule)
    found = iter(starts)
    return [next(found) if one.kind == "video" else 0.0 for one in named]
