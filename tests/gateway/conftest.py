"""Gateways in this process, before models that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.app import Gateway
from gateway.clock import Clock
from gateway.settings import GatewaySettings
from tests.gateway.scripted import ScriptedModels

BASE = "http://127.0.0.1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class TurnedClock:
    """Clocks that a test turns."""

    wall: float = 1_800_000_000.0
    monotonic: float = 100.0
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(lambda: self.wall, lambda: self.monotonic)


@dataclass(frozen=True)
class Started:
    """A gateway that runs, its models, and a client of it."""

    gateway: Gateway
    models: ScriptedModels
    client: httpx2.AsyncClient

    async def post(self, params: dict[str, Any], prompt: str = "a fox", **headers: str) -> dict[str, Any]:
        """The record of a job that must be accepted."""
        answer = await self.client.post("/v1/videos", json={"prompt": prompt, **params}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ended(self, job_id: str) -> dict[str, Any]:
        """The record of a job once it has ended."""
        if (active := self.gateway.jobs.active(job_id)) is not None:
            await active.ended.wait()
        return (await self.client.get(f"/v1/videos/{job_id}")).json()


class Connection:
    """One request on a connection that a test reads as the answer comes, and may close."""

    def __init__(self, one: Started, method: str, path: str, body: bytes | None = b"", **headers: str) -> None:
        """body: None for one that never comes."""
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        if body is not None:
            self._received.put_nowait({"type": "http.request", "body": body, "more_body": False})
        own = [(name.lower().encode(), text.encode()) for name, text in headers.items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost"), *own],
        }
        self.task = asyncio.ensure_future(one.gateway.app(scope, self._received.get, self._sent.put))

    async def status(self) -> int:
        """The status, once the answer begins."""
        return int((await self._sent.get())["status"])

    async def piece(self) -> bytes:
        """The next bytes of the answer."""
        return bytes((await self._sent.get())["body"])

    def close(self) -> None:
        """The client goes away."""
        self._received.put_nowait({"type": "http.disconnect"})


Start = Callable[..., AbstractAsyncContextManager[Started]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a gateway in the test's folder; calling it again is a restart."""

    @asynccontextmanager
    async def started(
        models: ScriptedModels | None = None, clock: Clock | None = None, **settings: Any
    ) -> AsyncIterator[Started]:
        models = models or ScriptedModels()
        chosen = replace(GatewaySettings("127.0.0.1:1", tmp_path / "gateway"), **settings)
        gateway = Gateway(chosen, models, clock)
        transport = httpx2.ASGITransport(gateway.app, raise_app_exceptions=False)
        async with (
            gateway.app.router.lifespan_context(gateway.app),
            httpx2.AsyncClient(transport=transport, base_url=BASE) as client,
        ):
            yield Started(gateway, models, client)

    return started
