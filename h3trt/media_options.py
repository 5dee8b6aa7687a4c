"""Media on the command line: `--first`, `--last` and `--ref` to the files and parameters of a request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h3trt.exits import CommandError
from runtime.media.facts import Kind
from runtime.media.limits import check_bytes
from runtime.reference_kinds import INPUTS, MEDIA_KINDS

REF_HELP = (
    "KIND:FILE or KIND:URL, KIND being image, video or audio; repeat it, in the order in which the model shall read "
    "them. A video may end in @SECONDS, where it begins to count: what follows the last @ is that if it is a number "
    "(for a file whose name ends so, add @0)."
)

_START = re.compile(r"(?P<source>.+)@(?P<seconds>[0-9]+(\.[0-9]+)?)", re.DOTALL)
_URL = re.compile(r"(data|https?):", re.IGNORECASE)


@dataclass(frozen=True)
class Attached:
    """What media add to a request: `files` by kind, and the parameters that tell their order and use."""

    params: dict[str, Any] = field(default_factory=dict)
    files: dict[Kind, list[bytes]] = field(default_factory=dict)

    def named(self, kind: Kind, source: str) -> dict[str, Any]:
        """The item of `references` for a file, which is read, or a URL. Raises OSError and RequestError."""
        if _URL.match(source):
            return {"type": kind, "url": source}
        path = Path(source)
        # Before it is read, so that a huge file costs nothing.
        check_bytes(path.stat().st_size, kind, source)
        elements = self.files.setdefault(kind, [])
        elements.append(path.read_bytes())
        return {"type": kind, "index": len(elements) - 1}


def attach(first: str | None, last: str | None, references: Sequence[str]) -> Attached:
    """The media of a request. Raises CommandError for wrong usage, OSError and RequestError for files."""
    attached = Attached()
    keyframes = {0: first, -1: last}
    given = {index: source for index, source in keyframes.items() if source is not None}
    if given and references:
        raise CommandError("--first and --last are frames of fl2va, --ref of ref2va: give one or the other")
    if given:
        items = [attached.named("image", source) for source in given.values()]
        attached.params.update(task="fl2va", references=items, frame_indices=list(given))
    elif references:
        attached.params.update(task="ref2va", references=[_reference(attached, text) for text in references])
    return attached


def _reference(attached: Attached, text: str) -> dict[str, Any]:
    # At the first colon: the path of a Windows drive has one of its own.
    word, colon, source = text.partition(":")
    kind = next((kind for kind in MEDIA_KINDS if kind == word), None)
    if kind is None or not colon or not source:
        raise CommandError(f"--ref {text!r}: must be KIND:FILE, KIND being one of {', '.join(INPUTS)}")
    start = _START.fullmatch(source) if kind == "video" else None
    if start is None:
        return attached.named(kind, source)
    return attached.named(kind, start["source"]) | {"start_time_seconds": float(start["seconds"])}
