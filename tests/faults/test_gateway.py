"""The gateway when processes die, disks fill, clients are slow or say things twice: every job is accounted for."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.disks import file_system
from tests.faults.http import GatewayProcess, events
from triton_repo.client import Client
from triton_repo.server import TritonServer

FOREVER = {"units": 10_000, "pause": 0.1}
CLIP = 12_000_000
KEY = {"Idempotency-Key": "the-same"}


@pytest.fixture
def url(toy_server: TritonServer) -> str:
    return toy_server.endpoints.grpc


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB."""
    with file_system(tmp_path, "20m") as mounted:
        yield mounted


def test_a_killed_gateway_frees_the_server_and_its_successor_accounts_for_every_job(url: str, tmp_path: Path) -> None:
    with GatewayProcess(url, tmp_path) as gateway:
        finished = gateway.submit(size=1000)
        gateway.wait(finished)
        running = gateway.submit(KEY, **FOREVER)
        waiting = [gateway.submit(**FOREVER) for _ in range(3)]
        gateway.wait(running, "in_progress")
        gateway.process.kill()
        gateway.process.wait()
    with Client(url) as client:
        assert client.generate("p", {}, timeout=60).mp4 == b"m"
    with GatewayProcess(url, tmp_path) as gateway:
        assert gateway.content(finished).content == b"m" * 1000
        for job_id in (running, *waiting):
            job = gateway.job(job_id)
            assert (job["status"], job["error"]["code"]) == ("failed", "restarted")
        # A client that did not see its answer and asks again does not make another job.
        assert gateway.post(KEY, **FOREVER).json()["id"] == running
        assert [one.name for one in (tmp_path / "clips").iterdir()] == [finished]
        assert gateway.wait(gateway.submit())["status"] == "completed"


def test_sigterm_under_load_ends_every_accepted_job_and_refuses_the_rest(url: str, tmp_path: Path) -> None:
    outcomes: Counter[int] = Counter()

    def load(gateway: GatewayProcess) -> None:
        """Until the gateway is gone."""
        while True:
            try:
                outcomes[gateway.post(units=2, pause=0.05).status_code] += 1
            except Exception:
                return

    with GatewayProcess(url, tmp_path) as gateway:
        clients = [threading.Thread(target=load, args=(gateway,)) for _ in range(4)]
        for client in clients:
            client.start()
        while outcomes[200] < 6:
            pass
        code, said = gateway.stop()
        for client in clients:
            client.join()
    assert code == 0, said
    assert set(outcomes) <= {200, 429, 503}
    with GatewayProcess(url, tmp_path) as gateway:
        jobs = gateway.client.get("/v1/videos?limit=100").json()["data"]
    assert len(jobs) >= outcomes[200]
    assert [job["error"] for job in jobs if job["status"] != "completed"] == []


def test_a_full_disk_fails_the_jobs_that_do_not_fit_and_no_others(url: str, small_disk: Path) -> None:
    with GatewayProcess(url, small_disk / "gateway") as gateway:
        first = gateway.submit(size=CLIP)
        assert gateway.wait(first)["status"] == "completed"
        second = gateway.wait(gateway.submit(size=CLIP))
        assert (second["status"], second["error"]["code"]) == ("failed", "storage")
        assert gateway.content(second["id"]).status_code == 422
        assert len(gateway.content(first).content) == CLIP
        assert [one.name for one in (small_disk / "gateway" / "clips").iterdir()] == [first]
        assert gateway.client.delete(f"/v1/videos/{first}").status_code == 200
        assert gateway.wait(gateway.submit(size=CLIP))["status"] == "completed"


def test_readers_that_stall_cost_no_memory_and_hold_nobody_up(url: str, tmp_path: Path) -> None:
    with GatewayProcess(url, tmp_path) as gateway:
        job_id = gateway.submit(size=CLIP)
        gateway.wait(job_id)
        assert len(gateway.content(job_id).content) == CLIP
        process = psutil.Process(gateway.process.pid)
        before = process.memory_full_info().uss
        address = urlsplit(gateway.url)
        readers = [socket.create_connection((address.hostname, address.port)) for _ in range(20)]
        for reader in readers:
            reader.sendall(f"GET /v1/videos/{job_id}/content HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
            assert reader.recv(4096).startswith(b"HTTP/1.1 200")
        assert gateway.wait(gateway.submit())["status"] == "completed"
        assert process.memory_full_info().uss < before + CLIP
        for reader in readers:
            reader.close()


def test_requests_that_come_twice_or_in_the_wrong_order_change_nothing(url: str, tmp_path: Path) -> None:
    with GatewayProcess(url, tmp_path) as gateway:
        client = gateway.client
        answers: list[str] = []
        twice = [
            threading.Thread(target=lambda: answers.append(gateway.submit(KEY, units=5, pause=0.1))) for _ in range(5)
        ]
        for one in twice:
            one.start()
        for one in twice:
            one.join()
        (job_id,) = set(answers)
        early = gateway.content(job_id)
        assert (early.status_code, early.json()["error"]["code"]) == (404, "not_found")
        gateway.wait(job_id)
        assert len(client.get("/v1/videos").json()["data"]) == 1
        late = client.get(f"/v1/videos/{job_id}/events")
        assert [event["status"] for event in events(late.text)] == ["completed"]
        assert [client.delete(f"/v1/videos/{job_id}").status_code for _ in range(2)] == [200, 404]
        for path in ("", "/content", "/events"):
            assert client.get(f"/v1/videos/{job_id}{path}").status_code == 404
        assert gateway.post(KEY, units=5, pause=0.1).status_code == 409
        running = gateway.submit(**FOREVER)
        deletions: list[int] = []
        both = [
            threading.Thread(target=lambda: deletions.append(client.delete(f"/v1/videos/{running}").status_code))
            for _ in range(2)
        ]
        for one in both:
            one.start()
        for one in both:
            one.join()
        assert sorted(deletions)[0] == 200
        assert sorted(deletions)[1] in (404, 409)
