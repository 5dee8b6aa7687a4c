"""Clients that take a connection and do not use it lose it; those that are slow with a body or an answer do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway import connections
from gateway.connections import Connection

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
PATIENCE = 0.2


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with its body, after a while."""
    body = b""
    while len(body) < 2:
        body += (await receive())["body"]
    await asyncio.sleep(3 * PATIENCE)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def _connected(app: Any = _echo) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(app, http=Connection, log_config=None)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(config, ServerState(), {}), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    yield reader, writer
    writer.close()
    server.close()


@pytest.mark.anyio
@pytest.mark.parametrize("head", [b"", HEAD], ids=["nothing", "byte by byte"])
async def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", PATIENCE)
    async with _connected() as (reader, writer):

        async def drip() -> None:
            for one in head:
                writer.write(bytes([one]))
                await asyncio.sleep(PATIENCE / 4)

        dripping = asyncio.create_task(drip())
        assert await asyncio.wait_for(reader.read(), 20) == b""
        dripping.cancel()


@pytest.mark.anyio
async def test_an_answer_that_nobody_reads_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", PATIENCE)
    ended = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        ended.set()

    async with _connected(endless) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(ended.wait(), 20)


@pytest.mark.anyio
async def test_a_slow_body_and_a_slow_answer_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", PATIENCE)
    async with _connected() as (reader, writer):
        for _ in range(2):
            writer.write(HEAD + b"o")
            await asyncio.sleep(3 * PATIENCE)
            writer.write(b"k")
            answer = await reader.readuntil(b"ok")
            assert answer.startswith(b"HTTP/1.1 200")
