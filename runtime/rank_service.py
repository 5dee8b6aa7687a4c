"""What the ranks of an engine store do: the stages of a pipeline as commands, and how these and answers look.

Every rank does each command with the same pipeline calls. A command's header has `do`, the stage or `generate`, and
`resolved`, the request; its parts are tensors (safetensors), or the request's files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import safetensors.torch
import torch

from engines.profile import Ranks
from engines.store import EngineStore
from runtime.condition_cache import CacheCounts, ConditionCache
from runtime.events import Cancellation, Event
from runtime.frames import Frame
from runtime.intake import Taken
from runtime.peers import Peers, portable
from runtime.pipeline import LATENTS, Encoded, Pipeline, Progress
from runtime.rank_worker import Send

NCCL = "nccl"
"""Torch's collectives between GPUs."""

ENCODED = tuple(field.name for field in fields(Encoded))


def joined(ranks: Ranks, on_gpu: bool) -> Peers:
    """This process' place; between GPUs, of which each process sees its own alone, by the fastest exchange there is."""
    if not on_gpu:
        return Peers.join(ranks)
    from plugins.kernels.open_group import asked_for, open_group

    fastest = partial(open_group, device=torch.device("cuda", 0), transport=asked_for(os.environ))
    return Peers.join(ranks, fastest, NCCL)


def packed(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> bytes:
    """Tensors under these names as one part."""
    return portable(dict(zip(names, tensors, strict=True)))


def unpacked(names: Sequence[str], part: bytes) -> list[torch.Tensor]:
    """The inverse, in the order of the names. Raises KeyError for one that is missing."""
    found = safetensors.torch.load(part)
    return [found[name] for name in names]


class PipelineService:
    """One rank's pipeline, and the commands that it does."""

    def __init__(self, pipeline: Pipeline, cache: ConditionCache) -> None:
        self._pipeline, self._cache = pipeline, cache
        self._counted = CacheCounts()
        """What has been told of the cache."""
        self._commands: Mapping[str, Callable[[Frame, Send, Progress, Cancellation], Frame]] = {
            "encode": self._encode,
            "denoise": self._denoise,
            "decode": self._decode,
            "generate": self._generate,
        }

    @classmethod
    def open(cls, store: str | Path, condition_cache: int) -> PipelineService:
        """Opens this rank's part of all stages, and does now what the first run of each engine would wait for.

        torch's default group must be open. Raises StoreError.
        """
        opened = EngineStore.open(store)
        cache = ConditionCache(condition_cache)
        profile = opened.manifest.profile
        peers = joined(profile.ranks, profile.on_gpu)
        pipeline = Pipeline.of_store(opened, cache=cache, peers=peers)
        pipeline.warm()
        return cls(pipeline, cache)

    def facts(self) -> Mapping[str, int]:
        """Bytes of weights that this rank's engines read."""
        return {"weights": sum(self._pipeline.weights)}

    def run(self, command: Frame, send: Send, progress: Callable[[Event], None], cancellation: Cancellation) -> Frame:
        """Does a command. Raises RequestError and Cancelled."""
        end = self._commands[command.header["do"]](command, send, progress, cancellation)
        return Frame({**end.header, "cache": asdict(self._counts())}, end.parts)

    def _counts(self) -> CacheCounts:
        """The cache's counts: hits and misses since they were last told, so that those of ranks after these add up."""
        told, self._counted = self._counted, self._cache.counts
        now = self._counted
        return replace(now, hits=now.hits - told.hits, misses=now.misses - told.misses)

    def _encode(self, command: Frame, send: Send, progress: Progress, cancellation: Cancellation) -> Frame:
        encoded = self._pipeline.encode(self._taken(command), progress, cancellation)
        return Frame({}, (packed(ENCODED, [getattr(encoded, name) for name in ENCODED]),))

    def _denoise(self, command: Frame, send: Send, progress: Progress, cancellation: Cancellation) -> Frame:
        resolved = self._pipeline.restore(command.header["resolved"])
        encoded = Encoded(*unpacked(ENCODED, command.parts[0]))
        made = self._pipeline.denoise(resolved, encoded, progress, cancellation)
        return Frame({}, tuple(packed(LATENTS, latents) for latents in made))

    def _decode(self, command: Frame, send: Send, progress: Progress, cancellation: Cancellation) -> Frame:
        resolved = self._pipeline.restore(command.header["resolved"])
        video, audio = unpacked(LATENTS, command.parts[0])
        return Frame({}, (self._pipeline.decode(resolved, video, audio, progress, cancellation),))

    def _generate(self, command: Frame, send: Send, progress: Progress, cancellation: Cancellation) -> Frame:
        def hand_on(index: int, piece: bytes) -> None:
            send(Frame({"piece": index}, (piece,)))

        clips = self._pipeline.generate(self._taken(command), progress, cancellation, hand_on)
        for index, mp4 in enumerate(clips):
            send(Frame({"clip": index}, (mp4,)))
        return Frame({})

    def _taken(self, command: Frame) -> Taken:
        # The server has admitted it to its memory; that of other machines' ranks may be another.
        resolved = self._pipeline.restore(command.header["resolved"])
        return Taken(resolved, self._pipeline.present(resolved), command.parts, command.header["memory_bytes"])
