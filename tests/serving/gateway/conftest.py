"""Gateways before the real server that the other tests of serving share."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.app import Gateway
from gateway.server import Server
from gateway.settings import GatewaySettings
from triton_repo.ports import LOOPBACK
from triton_repo.server import TritonServer

Serving = Callable[..., AbstractContextManager[httpx2.Client]]


@pytest.fixture(scope="session")
def serving(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Serving:
    """Runs a gateway with uvicorn in a thread; gives a client of it."""

    @contextmanager
    def served(**settings: Any) -> Iterator[httpx2.Client]:
        folder: Path = settings.pop("folder", None) or tmp_path_factory.mktemp("gateway")
        chosen = replace(GatewaySettings(server.endpoints.grpc, folder, drain_seconds=0), **settings)
        one = Server(Gateway(chosen))
        with socket.create_server((LOOPBACK, 0)) as listener:
            thread = threading.Thread(target=one.run, args=([listener],))
            thread.start()
            while not one.started:
                assert thread.is_alive(), "the gateway did not start"
                time.sleep(0.01)
            try:
                with httpx2.Client(base_url=f"http://{LOOPBACK}:{listener.getsockname()[1]}", timeout=120) as client:
                    yield client
            finally:
                one.ask_to_drain()
                thread.join(60)
                assert not thread.is_alive()

    return served


@pytest.fixture(scope="module")
def http(serving: Serving) -> Iterator[httpx2.Client]:
    """A client of a gateway that the tests of a module share."""
    with serving() as client:
        yield client
