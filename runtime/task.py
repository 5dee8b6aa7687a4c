"""The three tasks: which media each takes, which is meant where none is named, and which weights serve it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

from engines.profile import PARTITION_OF, Partition
from plugins.distilled import ArtifactTask
from runtime.media.facts import Kind
from runtime.media.limits import COUNT_IN_ALL, COUNTS
from runtime.reference_kinds import INPUTS, MEDIA_KINDS
from runtime.refusal import MISSING, RequestError

Task = ArtifactTask

TASKS: tuple[Task, ...] = get_args(Task)

KEYFRAMES_MAXIMUM = 2

NOUNS: Mapping[Kind, str] = {"image": "image", "video": "video", "audio": "sound"}


def tasks_of(partitions: Collection[Partition]) -> tuple[Task, ...]:
    """The tasks that some partitions serve."""
    return tuple(task for task in TASKS if PARTITION_OF[task] in partitions)


def choose_task(spelling: str, named: str | None, kinds: Collection[Kind], served: Sequence[Task]) -> Task:
    """The task that was named, else the one that the media ask for (spec: contract 1.3).

    spelling: how the request writes the field. served: the tasks of this server. Raises RequestError when the task is
    not among them.
    """
    task = next((task for task in TASKS if task == named), None) or _inferred(kinds, served)
    if task not in served:
        loaded = PARTITION_OF[task] in {PARTITION_OF[one] for one in served}
        why = "is not what the served model was distilled for" if loaded else _not_loaded(task)
        rule = f"{why}; this server serves {', '.join(served)}"
        raise RequestError(spelling, task, rule, tuple(served))
    return task


def _not_loaded(task: Task) -> str:
    return f"needs the weights {PARTITION_OF[task]}, which are not loaded"


def check_media(spelling: str, task: Task, kinds: Sequence[Kind]) -> None:
    """Raises RequestError unless a task takes so many media of these kinds (spec: contract 1.5)."""
    counts = Counter(kinds)
    if task == "t2va":
        _check_none(spelling, counts)
    elif task == "fl2va":
        _check_keyframes(counts)
    else:
        _check_references(counts)


def counted(number: int, kind: Kind) -> str:
    """So many of a kind, in words."""
    return f"{number} {NOUNS[kind]}{'' if number == 1 else 's'}"


def _inferred(kinds: Collection[Kind], served: Sequence[Task]) -> Task:
    if "video" in kinds or "audio" in kinds or set(served) == {"ref2va"}:
        return "ref2va"
    return "fl2va" if "image" in kinds else "t2va"


def _check_none(spelling: str, counts: Counter[Kind]) -> None:
    if counts:
        found = ", ".join(counted(counts[kind], kind) for kind in MEDIA_KINDS if counts[kind])
        fits = ("fl2va", "ref2va") if set(counts) == {"image"} and counts["image"] <= KEYFRAMES_MAXIMUM else "ref2va"
        raise RequestError(spelling, "t2va", f"takes no images, videos or sounds, and this request has {found}", fits)


def _check_keyframes(counts: Counter[Kind]) -> None:
    for kind in ("video", "audio"):
        if counts[kind]:
            rule = f"fl2va takes no {NOUNS[kind]}, only its first and last frame as images; ref2va takes references"
            raise RequestError(INPUTS[kind], counted(counts[kind], kind), rule)
    if not counts["image"]:
        raise RequestError(INPUTS["image"], MISSING, "fl2va needs 1 or 2 images, the first and the last frame")
    if counts["image"] > KEYFRAMES_MAXIMUM:
        rule = "fl2va takes 1 or 2 images, the first and the last frame; for references send task: ref2va"
        found, most = (counted(number, "image") for number in (counts["image"], KEYFRAMES_MAXIMUM))
        raise RequestError(INPUTS["image"], found, rule, most)


def _check_references(counts: Counter[Kind]) -> None:
    for kind, most in COUNTS.items():
        if counts[kind] > most:
            rule = f"ref2va takes at most {counted(most, kind)}"
            raise RequestError(INPUTS[kind], counted(counts[kind], kind), rule, counted(most, kind))
    if counts.total() > COUNT_IN_ALL:
        rule = f"ref2va takes at most {COUNT_IN_ALL} references of all kinds"
        raise RequestError("references", f"{counts.total()} references", rule, f"{COUNT_IN_ALL} references")
    if not counts["image"] and not counts["video"]:
        found = counted(counts["audio"], "audio") if counts else MISSING
        raise RequestError("references", found, "ref2va needs at least one image or video, also beside a sound")
