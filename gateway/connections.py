"""Connections that must be used: places for them are counted, and one on which nothing moves would hold its own."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""What a client gets to send the head of its first request; for one after it, at most twice as long."""

STALL_SECONDS = 120.0
"""How long a client may take nothing of an answer."""


class Connection(H11Protocol):
    """An HTTP connection that ends when a request's head does not come, or comes byte by byte, or nobody reads.

    uvicorn itself waits as long as the client likes.
    """

    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to count."""
        super().connection_made(transport)
        self._waited, self._last = True, self.cycle
        self._timer = self.loop.call_later(HEAD_SECONDS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Counts no more."""
        self._timer.cancel()
        self._reads()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client takes no more for now."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        self._reads()
        super().resume_writing()

    def _reads(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()

    def _check(self) -> None:
        """Ends a connection that has had no request since the last time."""
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._waited and self.cycle is self._last:
            self.transport.close()
            return
        self._waited, self._last = waits, self.cycle
        self._timer = self.loop.call_later(HEAD_SECONDS, self._check)
