"""Connections that must be used: places for them are counted, and one that asks for nothing would hold its own."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""What a client gets to send the head of its first request; for one after it, at most twice as long."""


class Connection(H11Protocol):
    """An HTTP connection that is closed when the head of a request does not come, or comes byte by byte.

    uvicorn itself waits for it as long as the client likes.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to count."""
        super().connection_made(transport)
        self._waited, self._last = True, self.cycle
        self._timer = self.loop.call_later(HEAD_SECONDS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Counts no more."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        waits = self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)
        if waits and self._waited and self.cycle is self._last:
            self.transport.close()
            return
        self._waited, self._last = waits, self.cycle
        self._timer = self.loop.call_later(HEAD_SECONDS, self._check)
