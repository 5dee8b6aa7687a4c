"""A group of ranks that serves at released dimensions with random weights: as `h3trt serve` starts one for a store.

`python -m bench.served FOLDER PROFILE` is one of its ranks; the profile is JSON.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import denoiser
from bench.synthetic import RandomWeights, Wanted, open_engines, synthetic_store
from engines.plan import Workload, make_plan, released_outline
from engines.profile import Profile
from runtime.condition_cache import ConditionCache
from runtime.events import Cancellation, Event
from runtime.frames import Frame
from runtime.intake import Intake
from runtime.pipeline import Pipeline, takes_part
from runtime.rank_place import Place
from runtime.rank_service import PipelineService, joined
from runtime.rank_worker import Send, work
from runtime.ranked_pipeline import RankedPipeline
from runtime.ranks import GroupSettings, RankGroup
from runtime.text import Tokenizer

GRAPHS = (
    *("text_encoder.embedding", "text_encoder.layer"),
    *denoiser.GRAPHS,
    *("video_decoder_tile", "audio_decoder"),
)
"""What a request of text alone needs."""

_LOG = logging.getLogger(__name__)

_MEMORY = "memory"
"""A command beside those of a pipeline's stages."""


@contextmanager
def serving(folder: Path, profile: Profile) -> Iterator[tuple[RankedPipeline, RankGroup]]:
    """A pipeline on as many processes, each with a GPU, as the profile has ranks; one where it has none.

    folder: what is compiled is kept there. Raises RankLost when a rank does not start.
    """
    store = synthetic_store(Wanted(profile, GRAPHS), folder)
    intake = Intake(store.manifest, Tokenizer(store.tokenizer_file))
    program = ("-P", "-m", "bench.served", str(folder), profile.model_dump_json())
    settings = GroupSettings(program=program, size=profile.ranks.processes)
    with RankGroup(settings, told=_LOG.warning) as group:
        yield RankedPipeline(intake, group), group


def memory_of_first(group: RankGroup, forwards: int) -> dict[str, float]:
    """Bytes at the height of what rank 0 has done so far, beside the plan of a request of so many forwards."""
    (end,) = group.run({"do": _MEMORY, "forwards": forwards}, (), Cancellation())
    found: dict[str, float] = end.header[_MEMORY]
    return found


class _Service(PipelineService):
    """The stages, and what memory they took."""

    def __init__(self, pipeline: Pipeline, profile: Profile, weights: RandomWeights) -> None:
        super().__init__(pipeline, ConditionCache(0))
        self._profile, self._weights = profile, weights

    @classmethod
    def of(cls, folder: Path, profile: Profile) -> _Service:
        """Opens this rank's part; torch's default group must be open."""
        peers = joined(profile.ranks, on_gpu=True)
        names = tuple(graph for graph in GRAPHS if takes_part(peers, graph))
        store = synthetic_store(Wanted(profile, GRAPHS), folder)
        weights = RandomWeights(store.manifest, names)
        pipeline = Pipeline(open_engines(store, names, weights), Tokenizer(store.tokenizer_file), peers=peers)
        pipeline.warm()
        return cls(pipeline, profile, weights)

    def run(self, command: Frame, send: Send, progress: Callable[[Event], None], cancellation: Cancellation) -> Frame:
        if command.header["do"] != _MEMORY:
            return super().run(command, send, progress, cancellation)
        plan = make_plan(self._profile, released_outline(), Workload(forwards=command.header["forwards"]))
        return Frame({_MEMORY: denoiser.memory(plan, self._weights)})


def main(folder: str, profile: str) -> None:
    """The life of one rank."""
    place = Place.of(os.environ)
    work(place, lambda: _Service.of(Path(folder), Profile.model_validate_json(profile)))


if __name__ == "__main__":
    main(*sys.argv[1:])
