"""A server starts, drains and stops without leaving anything, and says why when it cannot start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest

from tests.serving.conftest import Toy, Traces
from triton_repo.client import Client, ClientError, Failure
from triton_repo.errors import ServerError
from triton_repo.ports import LOOPBACK
from triton_repo.server import TritonServer
from triton_repo.shared_memory import remove_abandoned

pytestmark = pytest.mark.usefixtures("prefixes")


class Background:
    """Runs a call in a thread and keeps its outcome."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.outcome: object = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._call()
        except Exception as error:
            self.outcome = error

    def join(self) -> object:
        """The outcome: what the call returned or raised."""
        self._thread.join()
        return self.outcome


def test_stopping_leaves_nothing(toy: Toy) -> None:
    models: list[str] = []
    with TritonServer(toy.settings, models.append) as server:
        traces = Traces(server.pid)
        assert len(traces.processes) == 5
    assert traces.left() == []
    assert sorted(models) == ["first", "h3", "h3_prepare", "h3_stream", "second"]


def test_an_exception_in_the_block_leaves_nothing(toy: Toy) -> None:
    found: list[Traces] = []

    def interrupted() -> None:
        with TritonServer(toy.settings) as server:
            found.append(Traces(server.pid))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert found[0].left() == []


def test_draining_finishes_what_was_taken_and_refuses_the_rest(toy: Toy) -> None:
    """Also once the stream's queue has overflowed, after which Triton never finishes unloading that model."""
    with TritonServer(toy.settings) as server:
        url = server.endpoints.grpc
        work = {"units": 10, "pause": 0.1}
        calls = [Background(lambda: Client(url).generate("p", {"units": 1, "pause": 0.5}).mp4) for _ in range(5)]
        outcomes = [call.join() for call in calls]
        assert sum(isinstance(outcome, ClientError) for outcome in outcomes) == 2
        ensemble = Background(lambda: Client(url).generate_unary("p", work).mp4)
        running = Background(lambda: Client(url).generate("p", work).mp4)
        waiting = Background(lambda: Client(url).generate("p", work).mp4)
        time.sleep(0.5)
        late = Background(lambda: time.sleep(1) or Client(url).generate("p", {}))  # type: ignore[func-returns-value]
        started = time.monotonic()
        assert server.drain(30)
        assert time.monotonic() - started < 10
        assert isinstance(ensemble.join(), bytes)
        assert (running.join(), waiting.join()) == (b"m", b"m")
        refused = late.join()
    assert isinstance(refused, ClientError)
    assert refused.failure is Failure.UNAVAILABLE


def test_draining_ends_at_its_limit(toy: Toy) -> None:
    with TritonServer(toy.settings) as server:
        call = Background(lambda: Client(server.endpoints.grpc).generate("p", {"units": 1000, "pause": 0.1}))
        time.sleep(0.5)
        assert not server.drain(1)
        traces = Traces(server.pid)
    assert traces.left() == []
    assert isinstance(call.join(), ClientError)


def test_a_killed_parent_leaves_no_process_and_the_next_start_removes_its_shared_memory(toy: Toy) -> None:
    script = (
        "import sys, time; from tests.serving.conftest import Toy; from pathlib import Path\n"
        "from triton_repo.server import TritonServer\n"
        "with TritonServer(Toy(Path(sys.argv[1])).settings) as server: print(server.pid, flush=True); time.sleep(600)"
    )
    directory = toy.store.parent / "other"
    directory.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", script, str(directory)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    traces = Traces(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert psutil.wait_procs(traces.processes, timeout=5)[1] == []
    remove_abandoned()
    assert traces.shared_memory() == []


def test_the_shared_memory_of_a_running_server_is_not_removed(toy_server: TritonServer) -> None:
    traces = Traces(toy_server.pid)
    before = traces.shared_memory()
    assert traces.prefix not in remove_abandoned()
    assert traces.shared_memory() == before


def test_a_model_that_does_not_load_is_told_with_its_own_text(toy: Toy) -> None:
    (toy.store / "broken").touch()
    with pytest.raises(
        ServerError,
        match=r"did not start:\n(first, second|second, first): the toy is broken; to mend it, run: make toy\n",
    ):
        TritonServer(toy.settings).__enter__()


def test_a_port_in_use_is_refused_with_its_option(toy: Toy) -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=rf"grpc port {port} on 127.0.0.1 is in use; .*--grpc-port"):
            TritonServer(replace(toy.settings, grpc_port=port))


def test_a_server_that_is_not_ready_in_time_is_stopped(toy: Toy) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ServerError, match=r"not ready after 0.01 s"):
        TritonServer(replace(toy.settings, ready_timeout=0.01)).__enter__()
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []


def test_a_server_that_dies_is_noticed(toy: Toy) -> None:
    with TritonServer(toy.settings) as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="tritonserver died"):
            server.wait()


def test_a_model_process_that_dies_ends_the_wait(toy: Toy) -> None:
    with TritonServer(toy.settings) as server:
        victim = psutil.Process(server.pid).children()[0]
        threading.Timer(0.5, victim.kill).start()
        with pytest.raises(ServerError, match="a model's process died"):
            server.wait()
