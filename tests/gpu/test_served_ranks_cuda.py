"""A group that serves on two GPUs, at released dimensions with random weights: killed, asked to stop, asked again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.served import serving
from bench.synthetic import shared_by
from engines.profile import Profile
from runtime.events import Cancellation, Cancelled, Event, ignore
from runtime.intake import Taken
from runtime.probe import inspect_mp4
from runtime.rank_errors import RankLost
from runtime.ranked_pipeline import RankedPipeline
from runtime.ranks import RankGroup

PROFILE = Profile.load("h200x2_inductor")

COMPILED = Path("build/bench").absolute()
"""Where `h3trt bench` keeps what it compiles, which takes minutes."""

REQUEST: dict[str, Any] = {"aspect_ratio": "16:9", "duration": 4, "num_inference_steps": 2, "seed": 7}

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < PROFILE.gpus,
    reason=f"torch finds {torch.cuda.device_count()} CUDA devices, {PROFILE.gpus} serve",
)

Served = tuple[RankedPipeline, RankGroup]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    COMPILED.mkdir(parents=True, exist_ok=True)
    with serving(COMPILED, shared_by(PROFILE, PROFILE.ranks)) as pair:
        yield pair


@pytest.fixture
def taken(served: Served) -> Taken:
    return served[0].take("A red fox runs over fresh snow", REQUEST)


@pytest.fixture(scope="module")
def clip(served: Served) -> bytes:
    (made,) = served[0].generate(served[0].take("A red fox runs over fresh snow", REQUEST), ignore, Cancellation())
    return made


def test_it_makes_the_clip_that_was_asked_for(taken: Taken, clip: bytes) -> None:
    assert inspect_mp4(clip).problems(taken.resolved.width, taken.resolved.height, taken.resolved.frames) == []


@pytest.mark.parametrize("stage", ["encode", "denoise", "decode"])
def test_a_request_that_is_cancelled_costs_no_rank(served: Served, taken: Taken, clip: bytes, stage: str) -> None:
    pipeline, group = served
    before, cancellation = group.restarts, Cancellation()

    def stop(event: Event) -> None:
        if event.stage == stage:
            cancellation.cancel()

    with pytest.raises(Cancelled):
        list(pipeline.generate(taken, stop, cancellation))
    assert list(pipeline.generate(taken, ignore, Cancellation())) == [clip]
    assert group.restarts == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_one_request(served: Served, taken: Taken, clip: bytes, rank: int) -> None:
    pipeline, group = served
    before = group.restarts

    def kill(event: Event) -> None:
        if event.stage == "denoise" and event.index == 1:
            os.kill(group.pids[rank], signal.SIGKILL)

    with pytest.raises(RankLost, match=f"rank {rank}"):
        list(pipeline.generate(taken, kill, Cancellation()))
    assert list(pipeline.generate(taken, ignore, Cancellation())) == [clip]
    assert group.restarts == before + 1
