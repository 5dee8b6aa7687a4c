"""What an operator may choose of the gateway, and the limits that are not up to choice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.keys import Keys
from runtime.contract import MEDIA_BYTES
from runtime.request import Limits

SERVED_MODEL = Limits().model
"""The name that the field `model` must equal."""

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})

HELD_BYTES = 8 * MEDIA_BYTES
"""Bytes of the files of all accepted jobs together, which wait in memory."""

BODY_BYTES = MEDIA_BYTES
"""Of a request, its text and its files together."""

UPLOADS = 8
"""Bodies that are read at the same time."""

BODY_SECONDS = 30.0
"""Longest pause of a client within a body."""

BODY_RATE = 16 << 10
"""Bytes a second that a body must come with, a first pause apart: few of them are read at the same time."""

PREPARE_SECONDS = 120.0
"""Longest time that `h3_prepare` gets; it may fetch references from other hosts."""

JOBS_KEPT = 10_000
"""Records of ended jobs; older ones are removed first."""


@dataclass(frozen=True)
class GatewaySettings:
    """How to run the gateway.

    triton: host:port of the gRPC endpoint. folder: holds the database and the clips. queue: jobs that may wait.
    concurrency: jobs that are with the server at the same time. sync_seconds: how long /v1/videos/sync may take.
    keep_seconds and keep_bytes: what is kept of ended jobs. keys: None lets everybody in, who then must come by a
    loopback name unless `any_host` is set. A port of 0 takes a free one.
    """

    triton: str
    folder: Path
    host: str = "127.0.0.1"
    port: int = 8080
    queue: int = 8
    concurrency: int = 2
    sync_seconds: float = 600.0
    keep_seconds: float = 7 * 86400.0
    keep_bytes: int = 20 << 30
    drain_seconds: float = 600.0
    keys: Keys | None = None
    any_host: bool = False
