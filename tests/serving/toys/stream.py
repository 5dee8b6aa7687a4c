"""The toy's h3_stream: an event for each of `units` pauses, then `size` bytes of MP4.

Writes when it worked, so that a test can see who worked at the same time, and when a cancelled request stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from runtime.events import Cancellation, Event
from runtime.request import RequestError
from triton_repo import adapter

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel(adapter.Model):
    def open(self, store: Path) -> None:
        self.store = store

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            with self.working(request) as work:
                sender = request.get_response_sender()
                try:
                    mp4 = adapter.write_bytes("MP4", self._run(request, sender, work))
                    index = pb_utils.Tensor("INDEX", np.array([0]))
                    sender.send(pb_utils.InferenceResponse([index, mp4]), flags=FINAL)
                except Exception as error:
                    sender.send(pb_utils.InferenceResponse(error=work.error(error)), flags=FINAL)

    def _run(self, request: Any, sender: Any, work: adapter.Work) -> bytes:
        text = adapter.read_bytes(request, "PARAMS")
        params = json.loads(text)
        if "refuse" in params:
            raise RequestError("refuse", params["refuse"], "must not be given")
        cancellation = Cancellation(sender.is_cancelled)
        units = params.get("units", 0)
        sender.send(_message("RESOLVED", text))
        started = time.monotonic()
        try:
            for unit in range(units):
                cancellation.raise_if_cancelled(f"unit {unit}")
                time.sleep(params["pause"])
                event = Event("denoise", unit + 1, units, time.monotonic() - started)
                work.progress(event)
                sender.send(_message("EVENT", event.to_json()))
        finally:
            with (self.store / "spans").open("a") as file:
                file.write(f"{started} {time.monotonic()}\n")
        return b"m" * params.get("size", 1)


def _message(name: str, value: bytes | str) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([adapter.write_bytes(name, value)])
