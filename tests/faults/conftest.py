"""Toy servers for faults: one for hostile and unlucky clients, which must survive them all, and others to be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from tests.serving.conftest import Toy, prefixes, shared_toy, toy  # noqa: F401 - fixtures
from triton_repo.client import Client
from triton_repo.server import TritonServer

GENERATE = (
    "import sys, json; from triton_repo.client import Client\n"
    "ask = Client(sys.argv[1]).generate\n"
    "print(len(ask('p', json.loads(sys.argv[2]), lambda event: print('event', flush=True)).mp4), flush=True)"
)


@pytest.fixture(scope="session", autouse=True)
def _installed(installed: None) -> None:
    """All of these tests start models that import the installed project."""


@pytest.fixture(scope="session")
def toy_server(shared_toy: Toy) -> Iterator[TritonServer]:  # noqa: F811
    """It asks silent clients after a second whether they are still there."""
    with TritonServer(replace(shared_toy.settings, keepalive=1.0)) as server:
        yield server


@pytest.fixture
def client(toy_server: TritonServer) -> Iterator[Client]:
    with Client(toy_server.endpoints.grpc) as one:
        yield one


class OtherClient:
    """A client in a process of its own; use it as a context manager, which ends it."""

    def __init__(self, server: TritonServer, **params: Any) -> None:
        command = [sys.executable, "-c", GENERATE, server.endpoints.grpc, json.dumps(params)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> OtherClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        """The next thing that it says: `event`, or at the end the size of its MP4."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def own_memory(server: TritonServer) -> int:
    """Bytes that tritonserver itself has, without its models' processes."""
    return psutil.Process(server.pid).memory_full_info().uss
