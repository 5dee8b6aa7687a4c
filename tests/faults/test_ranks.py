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
from triton_repo import metric_table as table
from triton_repo.client import Client, ClientError, Failure
from triton_repo.control import read_metrics
from triton_repo.names import PUBLIC_MODELS, STREAM
from triton_repo.repository import RepositorySettings, render
from triton_repo.scrape import samples, value
from triton_repo.server import ServerSettings, TritonServer

KEEPER = "triton_repo.rank_keeper"
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


def settings(ranked: Path, directory: Path, *models: str) -> ServerSettings:
    render(ranked, directory / "repository", RepositorySettings(state=directory / "state"))
    return ServerSettings(directory / "repository", directory / "server.log", models)


@pytest.fixture(scope="module")
def ranked(store: Path, session_folder: Path) -> Path:
    return ranked_store(store, session_folder, ulysses=2, text_encoder=2, video_tiles=2)


@pytest.fixture(scope="module")
def server(ranked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with TritonServer(settings(ranked, tmp_path_factory.mktemp("ranks"), *PUBLIC_MODELS)) as one:
        yield one


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.endpoints.grpc) as one:
        yield one


def ranks(server: TritonServer, program: str = "runtime.rank_worker") -> list[psutil.Process]:
    """The processes of the ranks, in their order; or that of their keeper."""
    below = psutil.Process(server.pid).children(recursive=True)
    found = [process for process in below if program in process.cmdline()]
    return sorted(found, key=lambda process: int(process.environ().get("RANK", 0)))


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


def test_all_models_share_the_ranks(server: TritonServer, client: Client) -> None:
    assert len(ranks(server, KEEPER)) == 1
    assert client.generate_unary(PROMPT, QUICK).mp4 == client.generate(PROMPT, QUICK).mp4
    assert len(ranks(server)) == 2


def test_a_killed_keeper_costs_its_request_alone(server: TritonServer, client: Client) -> None:
    (keeper,), before = ranks(server, KEEPER), ranks(server)
    restarts = metric(server, table.RANK_RESTARTS)

    def kill(event: Mapping[str, Any]) -> None:
        if event["stage"] == "denoise" and event["index"] == 2:
            keeper.kill()

    with pytest.raises(ClientError, match="lost: the process that keeps them has ended") as lost:
        client.generate(PROMPT, LONG, kill)
    assert lost.value.failure is Failure.UNAVAILABLE
    assert client.generate_unary(PROMPT, QUICK).mp4 == client.generate(PROMPT, QUICK).mp4
    assert len(ranks(server, KEEPER)) == 1
    assert len(ranks(server)) == 2
    assert not {process.pid for process in before} & {process.pid for process in ranks(server)}
    assert reaches(server, table.RANK_RESTARTS, int(restarts) + 1)


def test_no_rank_survives_a_killed_server(server: TritonServer) -> None:
    """The last test of the server. One rank is stopped, as one that hangs would be; nobody else ends the others."""
    below = psutil.Process(server.pid).children(recursive=True)
    every = ranks(server)
    assert len(every) == 2
    assert len(ranks(server, KEEPER)) == 1
    every[0].send_signal(signal.SIGSTOP)
    os.kill(server.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while (left := [process for process in below if runs(process.pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []
