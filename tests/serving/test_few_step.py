"""A few-step model through Triton: its clips are those of the pipeline, and its schedule is the only one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.events import Cancellation, ignore
from runtime.pipeline import Pipeline
from tests.students import build_student, write_student
from triton_repo.client import Client
from triton_repo.health import check
from triton_repo.messages import ClientError, Failure
from triton_repo.names import PUBLIC_MODELS
from triton_repo.repository import RepositorySettings, render
from triton_repo.server import ServerSettings, TritonServer

PROMPT = "A red fox runs over fresh snow"
SMALLEST: dict[str, Any] = {"duration": 4, "aspect_ratio": "1:1", "width": 256, "height": 256, "seed": 7}


@pytest.fixture(scope="module")
def engines(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_student(store, write_student(store, tmp_path_factory.mktemp("student"), "fasth3_v1_dense"))


@pytest.fixture(scope="module")
def url(engines: Path) -> Iterator[str]:
    directory = engines.parent
    render(engines, directory / "repository", RepositorySettings(state=directory / "state"))
    settings = ServerSettings(directory / "repository", directory / "server.log", PUBLIC_MODELS)
    with TritonServer(settings) as server:
        yield server.endpoints.grpc


def test_its_clip_is_the_pipeline_s_and_the_answer_says_its_schedule(url: str, engines: Path) -> None:
    with Client(url) as client:
        made = client.generate(PROMPT, SMALLEST, timeout=300)
    pipeline = Pipeline.open(engines)
    taken = pipeline.take(PROMPT, SMALLEST)
    assert made.mp4 == next(pipeline.generate(taken, ignore, Cancellation()))
    told = made.resolved
    assert (told["forwards"], told["positions"]) == (4, [0.999, 0.749, 0.5, 0.25, 0.0])


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"num_inference_steps": 49}, "num_inference_steps: got 49; .* has exactly 4 evaluations; nearest legal: 4"),
        ({"flow_shift": 6}, "flow_shift: got 6.0; .* has 12 and no other"),
        ({"lora": {"name": "turbo"}}, "lora: got 'turbo'; not offered"),
        ({"task": "fl2va"}, "task: got 'fl2va'; is not what the served model was distilled for"),
    ],
    ids=["steps", "shift", "adapter", "task"],
)
def test_what_it_was_not_distilled_for_is_refused(url: str, params: dict[str, Any], told: str) -> None:
    with Client(url) as client, pytest.raises(ClientError, match=told) as caught:
        client.resolve(PROMPT, {**SMALLEST, **params}, 30)
    assert caught.value.failure is Failure.INVALID


def test_a_probe_has_a_clip_made_though_one_forward_is_refused(url: str) -> None:
    assert check(url, 300, generate=True).startswith("a clip of ")
