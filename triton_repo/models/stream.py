"""h3_stream: the whole pipeline in one decoupled model, with progress events and cancellation within one step.

`execute` blocks on purpose: requests that it has not taken wait in Triton's queue, where their number is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from runtime.events import Cancellation
from runtime.pipeline import Pipeline
from triton_repo import adapter

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel(adapter.Model):
    """PROMPT, PARAMS -> one message with RESOLVED, then messages with EVENT, then one with MP4 or an error."""

    def open(self, store: Path) -> None:
        """Open the engines of all stages."""
        self.pipeline = Pipeline.open(store)
        self.pipeline.warm()

    def execute(self, requests: Sequence[Any]) -> None:
        """Answers each request with its messages, one request after the other."""
        for request in requests:
            with self.counted():
                self._answer_in_parts(request)

    def _answer_in_parts(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            sender.send(_message("MP4", self._generate(request, sender)), flags=FINAL)
        except Exception as error:
            sender.send(pb_utils.InferenceResponse(error=self.error(error)), flags=FINAL)

    def _generate(self, request: Any, sender: Any) -> bytes:
        resolved = self.pipeline.resolve(*adapter.read_request(request))
        sender.send(_message("RESOLVED", resolved.model_dump_json()))
        return self.pipeline.generate(
            resolved,
            lambda event: sender.send(_message("EVENT", event.to_json())),
            Cancellation(sender.is_cancelled),
        )


def _message(name: str, value: bytes | str) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([adapter.write_bytes(name, value)])
