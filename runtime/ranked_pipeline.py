"""A pipeline whose engines run in the ranks of a group, and the choice between it and one in this process.

Requests are taken in here; what is left of them goes to the ranks as commands (`runtime.rank_service`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from engines.store import EngineStore
from runtime.condition_cache import CacheCounts, ConditionCache
from runtime.events import Cancellation, Cancelled, Event
from runtime.frames import Frame
from runtime.intake import Entrance, Intake, Taken
from runtime.media.source import MediaPolicy
from runtime.pipeline import LATENTS, STAGES, Encoded, Latents, Pieces, Pipeline, PipelineStage, Progress
from runtime.rank_place import Meeting
from runtime.rank_service import ENCODED, packed, unpacked
from runtime.ranks import DEFAULT_STALL_SECONDS, GroupSettings, RankGroup
from runtime.refusal import MISSING, RequestError
from runtime.request import Resolved
from runtime.text import Tokenizer


class Group(Protocol):
    """Ranks, as whoever has work for them sees them (`runtime.ranks.RankGroup` is one)."""

    @property
    def restarts(self) -> int:
        """How often they have been started again."""

    @property
    def facts(self) -> Mapping[str, list[int]]:
        """What they say of themselves: each number of all ranks, in their order."""

    def run(
        self, header: Mapping[str, Any], parts: Sequence[bytes], cancellation: Cancellation
    ) -> Generator[Frame, None, None]:
        """The messages that answer a command, the last with "end". Raises RankLost and Cancelled."""

    def close(self) -> None:
        """Ends them, or lets go of them."""


@dataclass
class CacheThere:
    """The cache of conditions in the ranks, as their last answer told of it. Hits and misses are of lost ranks too."""

    counts: CacheCounts

    def add(self, told: CacheCounts) -> None:
        """Counts on: hits and misses since the last time."""
        self.counts = replace(told, hits=self.counts.hits + told.hits, misses=self.counts.misses + told.misses)


class RankedPipeline(Entrance):
    """The stages over one store, each done by all ranks of a group. Serves one request at a time.

    All that waits for ranks raises RankLost when one is lost; the group starts again by itself.
    """

    def __init__(self, intake: Intake, group: Group) -> None:
        """group: has been started; it is closed with the pipeline."""
        super().__init__(intake)
        self._group = group
        self.cache = CacheThere(CacheCounts())
        """What the ranks keep of what they encode."""

    @property
    def restarts(self) -> int:
        """How often the ranks have been started again."""
        return self._group.restarts

    @property
    def weights(self) -> Sequence[int]:
        """Bytes of weights of each rank."""
        return self._group.facts.get("weights", [])

    def close(self) -> None:
        """Ends the ranks."""
        self._group.close()

    def warm(self) -> None:
        """Nothing: ranks have opened every engine before they are ready, and again when they are started again."""

    def encode(self, taken: Taken, progress: Progress, cancellation: Cancellation) -> Encoded:
        """What the denoiser is conditioned on. Raises Cancelled, and RequestError for files that do not decode."""
        (end,) = self._of_taken("encode", taken, progress, cancellation)
        return Encoded(*unpacked(ENCODED, end.parts[0]))

    def denoise(
        self, resolved: Resolved, encoded: Encoded, progress: Progress, cancellation: Cancellation
    ) -> Iterator[Latents]:
        """The latents of each output: output i is what seed + i gives. All of them are there when this returns.

        Raises RequestError when memory does not admit it, as a request may reach this stage by itself, and Cancelled.
        """
        part = packed(ENCODED, [getattr(encoded, name) for name in ENCODED])
        (end,) = self._run("denoise", resolved, [part], progress, cancellation)
        return iter([(video, audio) for video, audio in (unpacked(LATENTS, part) for part in end.parts)])

    def decode(
        self,
        resolved: Resolved,
        video: torch.Tensor,
        audio: torch.Tensor,
        progress: Progress,
        cancellation: Cancellation,
    ) -> bytes:
        """The MP4 of one output's latents.

        Raises RequestError when memory does not admit it, as a request may reach this stage by itself, and Cancelled.
        """
        (end,) = self._run("decode", resolved, [packed(LATENTS, (video, audio))], progress, cancellation)
        return end.parts[0]

    def generate(
        self,
        taken: Taken,
        progress: Progress,
        cancellation: Cancellation,
        pieces: Pieces = lambda index, piece: None,
    ) -> Iterator[bytes]:
        """All stages of one request: an MP4 for each output, when it is ready. Raises Cancelled.

        pieces: is given each MP4 also while it is made: a fragmented one fragment by fragment, another in one piece.
        """
        made: list[bytes] = []
        for frame in self._of_taken("generate", taken, progress, cancellation):
            # Only now: who has the last clip may have no more to be asked for its cancellation (Triton crashes then).
            yield from made
            made = [frame.parts[0]] if "clip" in frame.header else []
            if "piece" in frame.header:
                pieces(frame.header["piece"], frame.parts[0])

    def _of_taken(self, do: str, taken: Taken, progress: Progress, cancellation: Cancellation) -> Iterator[Frame]:
        return self._run(do, taken.resolved, taken.media, progress, cancellation, memory_bytes=taken.memory_bytes)

    def _run(
        self,
        do: str,
        resolved: Resolved,
        parts: Sequence[bytes],
        progress: Progress,
        cancellation: Cancellation,
        **further: Any,
    ) -> Iterator[Frame]:
        """What comes back beside progress, to the end, if that is a good one."""
        header = {"do": do, "resolved": resolved.model_dump_json(), **further}
        for frame in self._group.run(header, parts, cancellation):
            if "event" in frame.header:
                progress(Event.from_json(frame.header["event"]))
                continue
            _raise(frame.header)
            if "cache" in frame.header:
                self.cache.add(CacheCounts(**frame.header["cache"]))
            yield frame


AnyPipeline = Pipeline | RankedPipeline

Start = Callable[[GroupSettings], Group]
"""Starts ranks, or finds those that are there; raises GroupError and RankLost."""


def open_pipeline(
    store: str | Path,
    stages: Collection[PipelineStage] = STAGES,
    condition_cache: int = 0,
    policy: MediaPolicy | None = None,
    stall: float = DEFAULT_STALL_SECONDS,
    start: Start = lambda settings: RankGroup(settings).start(),
    on_gpu_in_ranks: bool = False,
) -> AnyPipeline:
    """Opens the engines of `stages` in this process, or those of all stages in ranks.

    In ranks where the profile has several of any stage; on GPUs also one, if `on_gpu_in_ranks`: other processes may
    then share it. condition_cache: bytes of encoded prompts and references that are kept. stall: seconds after which
    ranks that do not move are lost. Raises StoreError, and what `start` raises.
    """
    opened = EngineStore.open(store)
    profile = opened.manifest.profile
    if profile.ranks.processes == 1 and not (on_gpu_in_ranks and profile.on_gpu):
        return Pipeline.of_store(opened, stages, ConditionCache(condition_cache), policy)
    options = ("--store", str(opened.root.resolve()), "--condition-cache", str(condition_cache))
    settings = GroupSettings(
        # -P: whatever lies in the folder that the server was started in is not imported.
        program=("-P", "-m", "runtime.rank_worker", *options),
        size=profile.ranks.processes,
        # A single rank meets nobody, whatever a scheduler has put into the environment.
        meeting=Meeting.of(os.environ) if profile.ranks.processes > 1 else Meeting(),
        threads=0 if profile.on_gpu else profile.thread_count(),
        stall=stall,
    )
    return RankedPipeline(Intake(opened.manifest, Tokenizer(opened.tokenizer_file), policy), start(settings))


def _raise(header: Mapping[str, Any]) -> None:
    """Raises what a command has ended with, if that is not well."""
    if header.get("end") == "cancelled":
        raise Cancelled(header["text"])
    if header.get("end") == "refused":
        nearest = header["nearest"]
        value = MISSING if header["missing"] else header["value"]
        raise RequestError(header["field"], value, header["rule"], tuple(nearest) if type(nearest) is list else nearest)
