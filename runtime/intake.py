"""Takes requests in: checks, resolves, admits and tokenises them. Imports no torch, so that it starts at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.store import EngineStore, Manifest
from runtime.admission import MemoryModel
from runtime.given import GivenFields
from runtime.media.facts import Kind
from runtime.media.limits import check_bytes, check_together
from runtime.media.probe import probe
from runtime.media.source import MediaPolicy, fetch
from runtime.presentation import Presentation, presentation
from runtime.references import KnownFile, sha256_of
from runtime.refusal import RequestError
from runtime.request import Limits, Resolved, check_total, resolve, restore
from runtime.selection import Wanted, select
from runtime.task import tasks_of
from runtime.text import Tokenizer

Files = Mapping[Kind, Sequence[bytes]]
"""The files that came with a request, each whole, by kind; a kind that has none may be left out."""


@dataclass(frozen=True, eq=False)
class Taken:
    """A request that was taken in.

    media: the files of `resolved.references`, in their order. memory_bytes: at the height of the request.
    """

    resolved: Resolved
    presented: Presentation
    media: tuple[bytes, ...] = field(repr=False)
    memory_bytes: int


class Intake:
    """The front of a pipeline: everything about a request that needs no engine."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer, policy: MediaPolicy | None = None) -> None:
        self._dimensions = manifest.dimensions
        self._limits = limits_of(manifest)
        self.manifest = manifest
        """What the store was built from and for."""
        self._memory = MemoryModel.of(manifest)
        self._tokenizer = tokenizer
        self._policy = policy or MediaPolicy()

    @classmethod
    def open(cls, store: str | Path, policy: MediaPolicy | None = None) -> Intake:
        """Reads a store's manifest and tokenizer. Raises StoreError when the store cannot be served from."""
        opened = EngineStore.open(store)
        return cls(opened.manifest, Tokenizer(opened.tokenizer_file), policy)

    def take(self, prompt: bytes | str, params: Mapping[str, Any], files: Files | None = None) -> Taken:
        """The request with every choice made, admitted to this machine's memory, and its files. Raises RequestError."""
        given = files or {}
        counts = {kind: len(elements) for kind, elements in given.items()}
        wanted = select(GivenFields(params), counts, self._limits.tasks)
        media = self._gathered(wanted, given)
        known = [_known(one, data) for one, data in zip(wanted, media, strict=True)]
        check_together([one.facts for one in known], [one.where for one in known])
        resolved = resolve(prompt, params, self._dimensions, self._limits, known)
        presented = self.present(resolved)
        return Taken(resolved, presented, media, self.admit(resolved, len(presented.token_ids)))

    def resolve(self, prompt: bytes | str, params: Mapping[str, Any], files: Files | None = None) -> Resolved:
        """The request with every choice made, admitted to this machine's memory. Raises RequestError."""
        return self.take(prompt, params, files).resolved

    def restore(self, raw: bytes | str) -> Resolved:
        """A resolved request that came over the wire. Raises RequestError unless it is one that `take` can make."""
        return restore(raw, self._dimensions, self._limits)

    def retake(
        self, resolved: Resolved, tokens: NDArray[np.int64], tags: NDArray[np.int64], media: Sequence[bytes]
    ) -> Taken:
        """A request whose parts came over the wire, each believed only as far as it is what `take` makes of the others.

        tokens, tags [L]. Raises RequestError.
        """
        presented = self.present(resolved)
        for name, given, expected in (("TOKENS", tokens, presented.token_ids), ("TAGS", tags, presented.tags)):
            if not np.array_equal(given, expected):
                raise RequestError(name, f"{given.size} values", "must be those of the resolved request")
        self.check_media(resolved, media)
        return Taken(resolved, presented, tuple(media), self.admit(resolved, len(presented.token_ids)))

    def admit(self, resolved: Resolved, text_rows: int) -> int:
        """Checks a resolved request that came over the wire, with that many text rows. Raises RequestError.

        Returns the bytes at the height of the request.
        """
        return self._memory.admit(resolved, text_rows).peak

    def present(self, resolved: Resolved) -> Presentation:
        """What the text encoder reads of a request. Raises RequestError."""
        return presentation(resolved.prompt, resolved.references, self._tokenizer, self._dimensions.processor)

    def check_media(self, resolved: Resolved, media: Sequence[bytes]) -> None:
        """Raises RequestError unless these are the files of a resolved request that came over the wire."""
        if len(media) != len(resolved.references):
            rule = "must have one file for each reference of the resolved request"
            raise RequestError("MEDIA", f"{len(media)} files", rule, f"{len(resolved.references)} files")
        for place, (one, data) in enumerate(zip(resolved.references, media, strict=True)):
            where = f"MEDIA[{place}]"
            if sha256_of(data) != one.sha256:
                raise RequestError(where, f"{len(data)} bytes", "must be the file of the resolved request")
            if probe(data, one.kind, where, one.start_time_seconds) != one.facts:
                raise RequestError(where, str(one.facts), "must be what the file's header says")

    def _gathered(self, wanted: Sequence[Wanted], files: Files) -> tuple[bytes, ...]:
        """The files in packed order. Raises RequestError."""
        found: list[bytes] = []
        for one in wanted:
            data = files[one.kind][one.index] if one.index is not None else self._fetched(one)
            check_bytes(len(data), one.kind, one.where)
            found.append(data)
            check_total([len(data) for data in found], [other.where for other in wanted[: len(found)]])
        return tuple(found)

    def _fetched(self, one: Wanted) -> bytes:
        assert one.url is not None  # it has no index
        return fetch(one.url, one.kind, self._policy, one.where)


class Entrance:
    """How requests come into a pipeline, wherever its engines run."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    @property
    def manifest(self) -> Manifest:
        """What the store was built from and for."""
        return self._intake.manifest

    def take(self, prompt: bytes | str, params: Mapping[str, Any], files: Files | None = None) -> Taken:
        """The request with every choice made, admitted to this machine's memory, and its files. Raises RequestError."""
        return self._intake.take(prompt, params, files)

    def restore(self, raw: bytes | str) -> Resolved:
        """A resolved request that came over the wire. Raises RequestError unless it is one that `take` can make."""
        return self._intake.restore(raw)

    def retake(
        self, resolved: Resolved, tokens: NDArray[np.int64], tags: NDArray[np.int64], media: Sequence[bytes]
    ) -> Taken:
        """A request whose parts came over the wire: tokens and tags [L], and its files. Raises RequestError."""
        return self._intake.retake(resolved, tokens, tags, media)


def limits_of(manifest: Manifest) -> Limits:
    """What a server of these engines adds to the contract."""
    student, adapters = manifest.student, tuple(one.distilled for one in manifest.adapters.values())
    tasks = tasks_of(manifest.partitions)
    if student is not None:
        tasks = tuple(task for task in tasks if task in student.tasks)
    return Limits(tasks=tasks, student=student, adapters=adapters, tiers=manifest.tiers)


def _known(one: Wanted, data: bytes) -> KnownFile:
    facts = probe(data, one.kind, one.where, one.start_time_seconds)
    return KnownFile(one.where, sha256_of(data), len(data), one.start_time_seconds, facts)
