"""A pipeline whose engines run in ranks of its own: what comes back, and what leaves it as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h3trt.verify_requests import picture
from runtime.events import Cancellation, Event, ignore
from runtime.intake import Intake
from runtime.pipeline import Pipeline
from runtime.probe import inspect_mp4
from runtime.ranked_pipeline import AnyPipeline, RankedPipeline, open_pipeline
from runtime.ranks import GroupSettings, RankGroup
from runtime.refusal import RequestError
from tests.ranks.stores import ranked_store

REQUEST: dict[str, Any] = {
    "duration": 4,
    "width": 256,
    "height": 256,
    "num_inference_steps": 1,
    "seed": 7,
    "num_outputs_per_prompt": 2,
    "container": "fragmented",
}
PROMPT = "A red fox runs over fresh snow"


@pytest.fixture
def pipeline(
    store: Path, session_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RankedPipeline]:
    """Opened in a folder with files that have the names of ours, which are not to be run."""
    ranked = ranked_store(store, session_folder, ulysses=2, text_encoder=2, video_tiles=2)
    (tmp_path / "runtime.py").write_text("raise SystemExit('another program')")
    monkeypatch.chdir(tmp_path)
    opened = open_pipeline(ranked, condition_cache=1 << 24)
    assert isinstance(opened, RankedPipeline)
    yield opened
    opened.close()


class Gone(Exception):
    """The client of a request."""


def leave(event: Event) -> None:
    if event.stage == "denoise":
        raise Gone


def test_requests_come_back_whole_and_in_order_and_what_goes_wrong_costs_no_rank(pipeline: RankedPipeline) -> None:
    taken = pipeline.take(PROMPT, REQUEST, {"image": [picture(256, 256, seed=3)]})
    broken = dataclasses.replace(taken, media=(taken.media[0][: len(taken.media[0]) // 2],))
    with pytest.raises(RequestError, match="truncated"):
        pipeline.encode(broken, ignore, Cancellation())
    with pytest.raises(Gone):
        list(pipeline.generate(taken, leave, Cancellation()))

    events: list[Event] = []
    pieces: tuple[list[bytes], list[bytes]] = ([], [])
    clips = list(pipeline.generate(taken, events.append, Cancellation(), lambda i, piece: pieces[i].append(piece)))
    assert clips == [b"".join(one) for one in pieces]
    assert all(len(one) > 1 for one in pieces)
    for clip in clips:
        assert inspect_mp4(clip).problems(256, 256, taken.resolved.frames) == []
    assert [event.index for event in events if event.stage == "denoise"] == [0, 1, 2]
    # Of the picture and of the prompt, which the first of these requests has encoded.
    assert pipeline.cache.counts.hits == 2

    # Stage by stage, as the models of the ensemble do.
    encoded = pipeline.encode(taken, ignore, Cancellation())
    latents = list(pipeline.denoise(taken.resolved, encoded, ignore, Cancellation()))
    assert pipeline.decode(taken.resolved, *latents[1], ignore, Cancellation()) == clips[1]
    assert pipeline.restarts == 0
    assert len(pipeline.weights) == 2
    assert all(pipeline.weights)


def test_a_group_of_one_rank_makes_the_clip_of_a_process(store: Path) -> None:
    """As the models of a server with one GPU share it."""
    program = ("-P", "-m", "runtime.rank_worker", "--store", str(store), "--condition-cache", "0")
    request = {**REQUEST, "aspect_ratio": "1:1"}

    def clips(pipeline: AnyPipeline) -> list[bytes]:
        return list(pipeline.generate(pipeline.take(PROMPT, request), ignore, Cancellation()))

    with RankGroup(GroupSettings(program, size=1, threads=1)) as group:
        assert clips(RankedPipeline(Intake.open(store), group)) == clips(Pipeline.open(store))
