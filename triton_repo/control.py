"""The owner's side of a running tritonserver, over its HTTP endpoints: readiness, unloading, and what is in flight."""

from __future__ import annotations

import http.client
import json
import re

from triton_repo.names import RUNNING_METRIC

# What only the owner may ask for: with these a client could load code of its own or map the server's memory.
RESTRICTED = "model-repository,shared-memory,trace,logging"
HEADER = "h3trt-admin"
REQUEST_SECONDS = 10.0
UNREACHABLE = (OSError, http.client.HTTPException)
"""What every call raises when the server does not answer."""

WAITING_METRIC = "nv_inference_pending_request_count"
"""Triton's gauge of the requests that wait for a model."""


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
        _, text = self._call(self._metrics_address, "GET", "/metrics")
        waiting, running = (_gauge(text, name, model) for name in (WAITING_METRIC, RUNNING_METRIC))
        return None if running is None else int(running + (waiting or 0))

    def _call(self, address: str, method: str, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(address, timeout=REQUEST_SECONDS)
        try:
            body = "{}" if method == "POST" else None
            connection.request(method, path, body, {HEADER: self._secret})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()


def _gauge(metrics: str, name: str, model: str) -> float | None:
    """The value of one model's gauge in Prometheus text."""
    match = re.search(rf'^{name}\{{[^}}]*model="{re.escape(model)}"[^}}]*\}} (\S+)$', metrics, re.MULTILINE)
    return float(match[1]) if match else None
