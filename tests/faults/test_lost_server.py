"""A tritonserver that dies under load: each request ends for its client, and the next server takes its place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.faults.http import GatewayProcess
from tests.serving.conftest import Toy, Traces
from tests.serving.test_life_cycle import Background
from triton_repo.client import Client, ClientError, Failure
from triton_repo.errors import ServerError
from triton_repo.serving_state import ServingState
from triton_repo.shared_memory import ROOT
from triton_repo.watchdog import RestartPolicy, Watchdog

WORK = {"units": 100, "pause": 0.1}


@pytest.mark.usefixtures("prefixes")
def test_what_a_killed_server_was_doing_fails_what_waited_runs_and_nothing_is_left(toy: Toy, tmp_path: Path) -> None:
    """The second time it is a client that ends it, which Triton 2.51 lets any of them do."""
    ready_again, finished = threading.Semaphore(0), threading.Event()
    policy = RestartPolicy(attempts=6, first_delay=0.05)
    with Watchdog(toy.settings, ServingState(toy.state), policy, told=_told(ready_again, finished)) as watchdog:
        url = watchdog.endpoints.grpc
        watching = threading.Thread(target=_watch, args=(watchdog,), daemon=True)
        watching.start()
        first = Traces(_pid(watchdog))
        with GatewayProcess(url, tmp_path / "gateway", "--concurrency", "1") as gateway:
            running = gateway.submit(**WORK)
            gateway.wait(running, "in_progress")
            unary = Background(lambda: Client(url).generate_unary("p", WORK))
            queued = Background(lambda: Client(url).generate("p", WORK))
            waiting = gateway.submit(size=7)
            # Long enough for both to be sent; what waits for the device is in no count of Triton's.
            time.sleep(2)
            os.kill(_pid(watchdog), signal.SIGKILL)
            for call in (unary, queued):
                lost = call.join()
                assert isinstance(lost, ClientError)
                assert lost.failure is Failure.UNAVAILABLE
            assert gateway.wait(running)["error"]["code"] == "unavailable"
            assert ready_again.acquire(timeout=60)
            assert gateway.wait(waiting)["status"] == "completed"
            assert gateway.content(waiting).content == b"m" * 7
        assert first.processes_left() == []
        assert list(ROOT.glob(f"{first.prefix}*")) == []
        _end_by_header(url)
        assert ready_again.acquire(timeout=60)
        assert Client(url).generate("p", {}).mp4 == b"m"
        finished.set()
        os.kill(_pid(watchdog), signal.SIGKILL)
        watching.join()


def _watch(watchdog: Watchdog) -> None:
    with suppress(ServerError):
        watchdog.run()


def _told(ready_again: threading.Semaphore, finished: threading.Event) -> Callable[[str], None]:
    """Counts the servers that became ready again, and lets no other start once the test has finished."""

    def told(text: str) -> None:
        if finished.is_set():
            raise ServerError("the test is over")
        if text.startswith("ready again"):
            ready_again.release()

    return told


def _pid(watchdog: Watchdog) -> int:
    assert watchdog.pid is not None
    return watchdog.pid


def _end_by_header(url: str) -> None:
    """Streams that end in an error and are cancelled meanwhile, with the header that gives errors their codes."""
    request = service_pb2.ModelInferRequest(model_name="h3_stream")
    for name, text in (("PROMPT", b"p"), ("PARAMS", b'{"refuse": 1}')):
        request.inputs.add(name=name, datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    with grpc.insecure_channel(url) as channel:
        stub = GRPCInferenceServiceStub(channel)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            call = stub.ModelStreamInfer(iter([request]), metadata=[("triton_grpc_error", "true")], timeout=5)
            time.sleep(0.001)
            call.cancel()
            try:
                stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=5)
            except grpc.RpcError:
                return
