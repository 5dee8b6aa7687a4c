"""A server whose engines run in ranks: what clients see when one of them, the server or a client is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.errors import of_models
from runtime.probe import inspect_mp4
from tests.conftest import H3TRT
from tests.faults.conftest import OtherClient
from tests.ranks.processes import runs
from tests.ranks.stores import ranked_store
from tests.serving.conftest import Traces
from triton_repo import metric_table as table
from triton_repo.client import Client, ClientError, Failure
from triton_repo.control import read_metrics
from triton_repo.names import PREPARE, PUBLIC_MODELS, STREAM
from triton_repo.repository import RepositorySettings, render
from triton_repo.scrape import samples, value
from triton_repo.server import ServerSettings, TritonServer

PROMPT = "A fox runs over snow"
QUICK: Mapping[str, Any] = {
    "duration": 4,
    "aspect_ratio": "1:1",
    "width": 256,
    "height": 256,
    "num_inference_steps": 2,
    "seed": 1,
}
LONG: Mapping[str, Any] = {**QUICK, "num_inference_steps": 49}
ALL_STAGES = "encode,denoise,decode"


def settings(ranked: Path, directory: Path, *models: str) -> ServerSettings:
    render(ranked, directory / "repository", RepositorySettings(state=directory / "state"))
    return ServerSettings(directory / "repository", directory / "server.log", models)


@pytest.fixture(scope="module")
def ranked(store: Path, session_folder: Path) -> Path:
    return ranked_store(store, session_folder, ulysses=2, text_encoder=2, video_tiles=2)


@pytest.fixture(scope="module")
def server(ranked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The models that `h3trt generate` calls; those of the ensemble would be three more pairs of processes."""
    with TritonServer(settings(ranked, tmp_path_factory.mktemp("ranks"), STREAM, PREPARE)) as one:
        yield one


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.endpoints.grpc) as one:
        yield one


def ranks(server: TritonServer, stages: str = ALL_STAGES) -> list[psutil.Process]:
    """The processes of the ranks that serve these stages, in their order."""
    below = psutil.Process(server.pid).children(recursive=True)
    found = [process for process in below if {"runtime.rank_worker", stages} <= set(process.cmdline())]
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


def metric(server: TritonServer, one: table.Metric, **labels: str) -> float:
    return value(read_metrics(server.endpoints.metrics), one.name, model=STREAM, **labels) or 0.0


def reaches(server: TritonServer, one: table.Metric, count: int = 1, **labels: str) -> bool:
    """Whether so much is counted, in time: what a request ends with is, after its client has heard of it."""
    end = time.monotonic() + 30
    while metric(server, one, **labels) < count:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_the_command_makes_a_clip(server: TritonServer, tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    options = ["--seconds", "4", "--aspect-ratio", "1:1", "--width", "256", "--height", "256", "--forwards", "2"]
    where = ["--seed", "1", "--out", str(clip), "--url", server.endpoints.grpc, "--profile", "cpu-ranks2"]
    done = subprocess.run([*H3TRT, "generate", PROMPT, *options, *where], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert inspect_mp4(clip.read_bytes()).problems(256, 256, 107) == []
    weights = list(samples(read_metrics(server.endpoints.metrics), table.RANK_WEIGHTS.name, model=STREAM))
    assert sorted(labels["rank"] for labels, _ in weights) == ["0", "1"]
    assert all(count > 0 for _, count in weights)


def test_a_killed_rank_costs_its_request_alone(server: TritonServer, client: Client) -> None:
    before = ranks(server)
    assert len(before) == 2

    def kill(event: Mapping[str, Any]) -> None:
        if event["stage"] == "denoise" and event["index"] == 2:
            before[1].kill()

    with pytest.raises(ClientError, match="lost: rank 1 was ended by SIGKILL") as lost:
        client.generate(PROMPT, LONG, kill)
    assert lost.value.failure is Failure.UNAVAILABLE
    assert of_models(lost.value).code.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert reaches(server, table.REQUESTS, outcome="lost")
    assert len(client.generate(PROMPT, QUICK).mp4) > 1000
    assert not {process.pid for process in before} & {process.pid for process in ranks(server)}
    assert reaches(server, table.RANK_RESTARTS)
    # Encoded by the ranks before and by these, whose own count begins at 0.
    assert reaches(server, table.CACHE_MISSES, 2)


def test_the_request_of_a_killed_client_stops_on_all_ranks(server: TritonServer, client: Client) -> None:
    before, done = [process.pid for process in ranks(server)], metric(server, table.UNITS, stage="denoise")
    with OtherClient(server, **LONG) as other:
        assert other.line() == "event"
        while metric(server, table.UNITS, stage="denoise") == done:
            time.sleep(0.05)
        other.process.kill()
    assert reaches(server, table.REQUESTS, outcome="cancelled")
    assert metric(server, table.UNITS, stage="denoise") - done < LONG["num_inference_steps"] / 2
    # They are in step: the next request is served by the same ones.
    assert len(client.generate(PROMPT, QUICK).mp4) > 1000
    assert [process.pid for process in ranks(server)] == before


def test_no_rank_survives_a_killed_server(server: TritonServer) -> None:
    """The last test of the server. One rank is stopped, as one that hangs would be; nobody else ends the others."""
    below = psutil.Process(server.pid).children(recursive=True)
    every = ranks(server)
    assert len(every) == 2
    every[0].send_signal(signal.SIGSTOP)
    os.kill(server.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while (left := [process for process in below if runs(process.pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


@pytest.mark.soak
def test_the_ensemble_of_ranks_makes_the_clip_of_the_stream(ranked: Path, tmp_path: Path) -> None:
    with TritonServer(settings(ranked, tmp_path, *PUBLIC_MODELS)) as one, Client(one.endpoints.grpc) as client:
        # Each of the models that runs a stage that is shared has ranks of its own.
        assert len(ranks(one)) == len(ranks(one, "denoise")) == 2
        assert client.generate_unary(PROMPT, QUICK).mp4 == client.generate(PROMPT, QUICK).mp4
        traces = Traces(one.pid)
    assert traces.left() == []
