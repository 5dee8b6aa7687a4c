"""The bytes of a clip while it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gateway.active import Active
from gateway.clips import Clips

_CHUNK = 256 << 10


class BrokenOff(Exception):
    """A job failed while its clip was being read: the connection must not end as if the clip had."""


async def following(clips: Clips, active: Active, index: int) -> AsyncIterator[bytes]:
    """An output from its first byte to its last, read from the disk, so that a slow reader costs no memory.

    Raises BrokenOff.
    """
    offset, size = 0, await active.beyond(index, 0)
    if size:
        with await asyncio.to_thread(clips.opened, active.job.id, index) as file:
            while offset < size:
                chunk = await asyncio.to_thread(file.read, min(_CHUNK, size - offset))
                offset += len(chunk)
                yield chunk
                size = size if offset < size else await active.beyond(index, offset)
    if active.job.status != "completed":
        raise BrokenOff(f"{active.job.id} failed: {active.job.error}")
