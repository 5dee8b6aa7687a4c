"""The owner's side of a running tritonserver, over its HTTP endpoints: readiness, unloading, and what is in flight."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triton_repo.metric_table import RUNNING, UNITS, WAITING
from triton_repo.scrape import value

# What only the owner may ask for: with these a client could load code of its own or map the server's memory.
RESTRICTED = "model-repository,shared-memory,trace,logging"
HTTP_RESTRICTED = f"{RESTRICTED},inference"
"""Over HTTP, inference too: one body in a few 100,000 chunks ends a Triton 2.51 that begins to read it."""
HEADER = "h3trt-admin"
REQUEST_SECONDS = 10.0
UNREACHABLE = (OSError, http.client.HTTPException)
"""What every call raises when the server does not answer."""


@dataclass(frozen=True)
class Activity:
    """What models are doing: requests that wait for them, requests that they work on, and progress made since start."""

    waiting: int
    running: int
    units: int


class Control:
    """Calls to one server at `address` (host:port); `secret` opens the restricted ones."""

    def __init__(self, address: str, metrics_address: str, secret: str) -> None:
        self._address = address
        self._metrics_address = metrics_address
        self._secret = secret

    def is_ready(self, model: str) -> bool:
        """Whether the model can be called."""
        return self._call(self._address, "GET", f"/v2/models/{model}/ready")[0] == http.client.OK

    def unload(self, model: str) -> None:
        """Refuse new requests for the model; those that have begun run on, an ensemble's through all its steps."""
        self._call(self._address, "POST", f"/v2/repository/models/{model}/unload")

    def is_unloading(self, model: str) -> bool:
        """Whether an unloaded model still has requests."""
        _, text = self._call(self._address, "POST", "/v2/repository/index")
        return any(entry["name"] == model and entry.get("state") == "UNLOADING" for entry in json.loads(text))

    def requests(self, model: str) -> int | None:
        """Requests that wait for the model or run in it; None for one that does not publish what runs in it."""
        text = self._metrics()
        running = value(text, RUNNING.name, model=model)
        return None if running is None else int(running + (value(text, WAITING, model=model) or 0))

    def activity(self, models: Sequence[str], seconds: float = REQUEST_SECONDS) -> Activity:
        """What these models are doing together. A server that hangs does not answer within `seconds`, which raises."""
        text = self._metrics(seconds)
        sums = [
            sum(value(text, name, model=model) or 0.0 for model in models)
            for name in (WAITING, RUNNING.name, UNITS.name)
        ]
        return Activity(*map(int, sums))

    def _metrics(self, seconds: float = REQUEST_SECONDS) -> str:
        return read_metrics(self._metrics_address, seconds)

    def _call(self, address: str, method: str, path: str) -> tuple[int, str]:
        return _call(address, method, path, {HEADER: self._secret}, REQUEST_SECONDS)


def read_metrics(address: str, seconds: float = REQUEST_SECONDS) -> str:
    """The Prometheus text of the server whose metrics are at `address`. Raises one of UNREACHABLE."""
    return _call(address, "GET", "/metrics", {}, seconds)[1]


def _call(address: str, method: str, path: str, headers: Mapping[str, str], seconds: float) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=seconds)
    try:
        connection.request(method, path, "{}" if method == "POST" else None, dict(headers))
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()
