"""Runs the application with uvicorn, and stops it in order: first the jobs, then the connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from gateway.app import Gateway
from gateway.clock import Clock
from gateway.connections import Connection
from gateway.jobs import Drained
from gateway.settings import LOOPBACK_HOSTS, GatewaySettings
from gateway.store import JobStore
from triton_repo.errors import ServerError
from triton_repo.workplace import held

CONNECTIONS = 512
"""More are answered 503 at once."""

FAREWELL_SECONDS = 5
"""What connections get to end when all jobs have ended; a client that waits for a clip gets its answer in this time."""


class Server(uvicorn.Server):
    """A uvicorn server that a signal asks to drain, and a second one to stop at once."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        config = uvicorn.Config(
            gateway.app,
            http=Connection,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=FAREWELL_SECONDS,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        super().__init__(config)
        self._draining: asyncio.Task[None] | None = None
        self.drained: Drained | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first one drains."""
        if self._draining is not None or not self.started:
            self.should_exit = self.force_exit = True
            return
        self.ask_to_drain()

    def ask_to_drain(self) -> None:
        """Refuses new jobs, lets the others end, and then ends the server. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = self._draining or self._loop.create_task(self._drain())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to serve."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def _drain(self) -> None:
        self.drained = await self._gateway.jobs.drain(self._gateway.settings.drain_seconds)
        self.should_exit = True


def serve(settings: GatewaySettings, listening: Callable[[str], None]) -> Drained | None:
    """Runs a gateway until SIGTERM or SIGINT; what became of its jobs, None when it was not let drain.

    listening: called with the gateway's URL. Raises ServerError and OSError.
    """
    if settings.keys is None and settings.host not in LOOPBACK_HOSTS and not settings.any_host:
        raise ServerError(
            f"{settings.host} can be reached from other machines, and there are no keys",
            "give --keys FILE, or --without-keys where something in front asks for them",
        )
    with held(settings.folder), _listener(settings) as listener:
        # Opened here once, for uvicorn would not let the error out.
        JobStore(settings.folder / JobStore.FILE, Clock()).close()
        server = Server(Gateway(settings))
        host, port = listener.getsockname()[:2]
        listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        server.run([listener])
        return server.drained


def _listener(settings: GatewaySettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        place = f"{settings.host}:{settings.port}"
        raise ServerError(f"cannot listen on {place}: {error.strerror}", "give another: --port PORT") from error
