"""A server that is lost is started again under the same ports, and given up when that does not help."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from dataclasses import dataclass

import psutil
import pytest

from tests.serving.conftest import Toy
from tests.serving.test_life_cycle import Background
from triton_repo import metric_table as table
from triton_repo.client import Client, ClientError, Failure
from triton_repo.control import Activity
from triton_repo.errors import ServerError
from triton_repo.scrape import value
from triton_repo.serving_state import ServingState
from triton_repo.watchdog import Heartbeat, RestartPolicy, Watchdog


def _metrics(watchdog: Watchdog) -> str:
    with urllib.request.urlopen(f"http://{watchdog.endpoints.metrics}/metrics") as answer:
        return answer.read().decode()


@pytest.mark.usefixtures("prefixes")
def test_a_lost_server_is_started_again_until_that_does_not_help(toy: Toy) -> None:
    """First a model's process dies, then the server hangs, then it dies and its models no longer load."""
    told: list[str] = []
    restarts: list[float | None] = []

    def tritonserver() -> int:
        assert watchdog.pid is not None
        return watchdog.pid

    def tell(text: str) -> None:
        told.append(text)
        if not text.startswith("ready again"):
            return
        assert Client(watchdog.endpoints.grpc).generate("p", {}).mp4 == b"m"
        restarts.append(value(_metrics(watchdog), table.RESTARTS.name))
        if len(restarts) == 1:
            os.kill(tritonserver(), signal.SIGSTOP)
        else:
            (toy.store / "broken").touch()
            os.kill(tritonserver(), signal.SIGKILL)

    policy = RestartPolicy(attempts=3, first_delay=0.05, hang=1)
    watchdog = Watchdog(toy.settings, ServingState(toy.state), policy, told=tell)
    with watchdog:
        endpoints = watchdog.endpoints
        request = Background(lambda: Client(endpoints.grpc).generate("p", {"units": 99, "pause": 0.1}))
        threading.Timer(0.5, lambda: psutil.Process(tritonserver()).children()[0].kill()).start()
        with pytest.raises(ServerError, match=r"given up after 3 restarts in a row;(?s:.*)the toy is broken"):
            watchdog.run()
        assert watchdog.endpoints == endpoints
    assert restarts == [1, 2]
    assert "a model's process died" in told[0]
    assert "not answered" in told[2]
    lost = request.join()
    assert isinstance(lost, ClientError)
    assert lost.failure is Failure.UNAVAILABLE


def test_each_restart_of_a_row_waits_twice_as_long_up_to_a_limit() -> None:
    policy = RestartPolicy(first_delay=1, longest_delay=5)
    assert [policy.delay(attempt) for attempt in (1, 2, 3, 4, 5)] == [1, 2, 4, 5, 5]


@dataclass
class Simulated:
    """A server's owner side and a clock."""

    now: float = 0.0
    doing: Activity | None = None

    def activity(self, models: tuple[str, ...], seconds: float) -> Activity:
        if self.doing is None:
            raise ConnectionRefusedError
        return self.doing

    def heartbeat(self, patience: float) -> Heartbeat:
        return Heartbeat(self, patience, lambda: self.now)  # type: ignore[arg-type]


def test_work_without_progress_is_a_hang_and_idleness_and_progress_are_none() -> None:
    server = Simulated(doing=Activity(0, 0, 7))
    beat = server.heartbeat(60)
    for moment, doing, hung in [
        (100, Activity(0, 0, 7), False),  # idle
        (200, Activity(1, 1, 7), False),  # new work
        (250, Activity(1, 1, 8), False),
        (300, Activity(1, 1, 8), False),
        (320, Activity(1, 1, 8), True),
    ]:
        server.now, server.doing = moment, doing
        assert bool(beat()) is hung, moment


def test_a_request_that_no_model_takes_is_a_hang() -> None:
    server = Simulated(doing=Activity(1, 0, 0))
    beat = server.heartbeat(60)
    server.now = 10
    assert not beat()
    server.now = 80
    assert "no progress for 70 s" in beat()


def test_silence_is_a_hang_once_it_lasts() -> None:
    server = Simulated()
    beat = server.heartbeat(60)
    server.now = 50
    assert not beat()
    server.now = 70
    assert "not answered for 70 s" in beat()


def test_without_patience_nothing_hangs() -> None:
    server = Simulated()
    beat = server.heartbeat(0)
    server.now = 1e6
    assert not beat()
