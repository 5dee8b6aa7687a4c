"""The gRPC entry under random requests: nothing ends, nothing grows, and the next request is answered as ever."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

from tests.serving.conftest import Traces
from tests.serving.fuzzing import QUICK, Fuzz
from triton_repo.client import Client
from triton_repo.server import TritonServer

PROMPT = "A red fox trots through fresh snow."
WORKERS = 3
GROWTH = 1.1
"""What all processes together may gain in the second half; in the first one allocators find their size."""


def test_half_a_minute_of_random_requests_changes_nothing(server: TritonServer) -> None:
    _survives(server, 30, first_seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_minutes_of_random_requests_change_nothing(server: TritonServer) -> None:
    _survives(server, 600, first_seed=int(time.time()))


def _survives(server: TritonServer, seconds: float, first_seed: int) -> None:
    traces = Traces(server.pid)
    with Client(server.endpoints.grpc) as client:
        expected = client.generate(PROMPT, QUICK).mp4
        _fuzz(server, seconds / 2, first_seed, drops=True)
        memory, files = _memory(traces), traces.shared_memory()
        _fuzz(server, seconds / 2, first_seed + WORKERS, drops=False)
        assert [one for one in traces.processes if not _runs(one)] == [], f"seeds from {first_seed}"
        assert client.generate(PROMPT, QUICK).mp4 == expected
        assert client.generate_unary(PROMPT, QUICK).mp4 == expected
    assert sorted(traces.shared_memory()) == sorted(files)
    assert _memory(traces) < GROWTH * memory


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _fuzz(server: TritonServer, seconds: float, first_seed: int, drops: bool) -> None:
    """Several clients at once, each with the next seed."""
    end = time.monotonic() + seconds
    process = psutil.Process(server.pid)

    def work(seed: int) -> None:
        fuzz = Fuzz(server.endpoints.grpc, seed, drops)
        while time.monotonic() < end and _runs(process):
            fuzz.step()
        fuzz.close()

    workers = [threading.Thread(target=work, args=(first_seed + index,)) for index in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _memory(traces: Traces) -> int:
    """Bytes of the server and its models that are theirs alone."""
    return sum(process.memory_full_info().uss for process in traces.processes)
