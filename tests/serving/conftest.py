"""Servers for the tests: one with toy models for the whole session, and where to look for what a server leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tritonclient.grpc import InferenceServerClient

from tests.conftest import Demonstration, report_figure
from tests.serving.toy_repository import write_toy_repository
from triton_repo.client import Client
from triton_repo.names import PUBLIC_MODELS
from triton_repo.ports import DEFAULT_PORTS, port_is_free
from triton_repo.repository import RepositorySettings, render
from triton_repo.server import ServerSettings, TritonServer
from triton_repo.shared_memory import ROOT as SHARED_MEMORY
from triton_repo.shared_memory import private_prefix

TOY_READY_SECONDS = 60.0


@pytest.fixture(scope="session", autouse=True)
def _installed(installed: None) -> None:
    """All of these tests start models that import the installed project."""


class Toy:
    """A toy repository of its own, and settings to serve it with."""

    def __init__(self, directory: Path) -> None:
        self.store = directory / "store"
        self.repository = directory / "repository"
        self.log_file = directory / "server.log"
        self.state = directory / "state"
        write_toy_repository(self.repository, self.store, self.state)
        self.settings = ServerSettings(self.repository, self.log_file, PUBLIC_MODELS, ready_timeout=TOY_READY_SECONDS)

    def spans(self) -> list[tuple[float, float]]:
        """When models were at work, in the order in which they ended."""
        lines = (self.store / "spans").read_text().splitlines()
        return [(float(start), float(end)) for start, end in map(str.split, lines)]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


@pytest.fixture(scope="session")
def shared_toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def toy_server(shared_toy: Toy) -> Iterator[TritonServer]:
    with TritonServer(shared_toy.settings) as server:
        yield server


@pytest.fixture(scope="session")
def server(
    demonstration: Demonstration, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TritonServer]:
    """The real models over the miniature's engines, for all tests that do not stop it."""
    directory = tmp_path_factory.mktemp("server")
    render(demonstration.store, directory / "repository", RepositorySettings(state=directory / "state"))
    settings = ServerSettings(directory / "repository", directory / "server.log", PUBLIC_MODELS)
    started = time.monotonic()
    with TritonServer(settings) as one:
        report_figure(request.config, f"Triton with the real models was ready after {time.monotonic() - started:.1f} s")
        yield one


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.endpoints.grpc) as one:
        yield one


@pytest.fixture(scope="module")
def raw(server: TritonServer) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(server.endpoints.grpc) as one:
        yield one


class Traces:
    """What one tritonserver has of this machine: processes, ports, shared memory, temporary folders."""

    def __init__(self, pid: int) -> None:
        process = psutil.Process(pid)
        self.processes = [process, *process.children(recursive=True)]
        self.ports = [int(_argument(process, f"--{service}-port=")) for service in DEFAULT_PORTS]
        self.prefix = _argument(process, "shm-region-prefix-name=")
        self.backends = Path(_argument(process, "--backend-directory="))
        assert self.shared_memory(), "a running server has shared memory"

    def shared_memory(self) -> list[str]:
        """Its files in /dev/shm."""
        return [path.name for path in SHARED_MEMORY.glob(f"{self.prefix}*")]

    def processes_left(self) -> list[psutil.Process]:
        """Its processes that still run, a second having been given to those that were just killed."""
        _, alive = psutil.wait_procs(self.processes, timeout=1)
        # One that was killed with its parent stays in the table until pid 1 reaps it, which not every container's does.
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def left(self) -> list[str]:
        """Everything that is still there."""
        processes = [f"process {process}" for process in self.processes_left()]
        ports = [f"port {port}" for port in self.ports if not port_is_free(port)]
        folders = [str(self.backends)] if self.backends.exists() else []
        return processes + ports + folders + self.shared_memory()


def _argument(process: psutil.Process, name: str) -> str:
    return next(argument.partition(name)[2] for argument in process.cmdline() if name in argument)


@pytest.fixture
def prefixes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The shared memory prefixes of the servers that a test starts; fails when one of them leaves a file."""
    used: list[str] = []

    @contextmanager
    def recorded() -> Iterator[str]:
        with private_prefix() as prefix:
            used.append(prefix)
            yield prefix

    monkeypatch.setattr("triton_repo.server.private_prefix", recorded)
    yield used
    assert [path for prefix in used for path in SHARED_MEMORY.glob(f"{prefix}*")] == []
