"""h3_stream: the whole pipeline in one decoupled model, with progress events and cancellation within one step.

`execute` blocks on purpose: requests that it has not taken wait in Triton's queue, where their number is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from runtime.condition_cache import ConditionCache
from runtime.events import Cancellation, Event
from runtime.pipeline import Pipeline
from runtime.work import work_of
from triton_repo import adapter

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
MORE = 0


class TritonPythonModel(adapter.Model):
    """PROMPT, PARAMS, IMAGES, VIDEOS, AUDIOS -> messages: RESOLVED; many with EVENT; INDEX and MP4 of each output.

    An error ends them.
    """

    def open(self, store: Path) -> None:
        """Open the engines of all stages."""
        self.cache = ConditionCache(self.settings.condition_cache)
        self.pipeline = Pipeline.open(store, policy=self.settings.media, cache=self.cache)
        self.measure(self.pipeline.manifest)
        self.pipeline.warm()

    def execute(self, requests: Sequence[Any]) -> None:
        """Answers each request with its messages, one request after the other."""
        for request in requests:
            with self.working(request) as work:
                self._answer_in_parts(request, work)

    def _answer_in_parts(self, request: Any, work: adapter.Work) -> None:
        sender = request.get_response_sender()
        try:
            self._generate(request, sender, work)
        except Exception as error:
            sender.send(pb_utils.InferenceResponse(error=work.error(error)), flags=FINAL)

    def _generate(self, request: Any, sender: Any, work: adapter.Work) -> None:
        def report(event: Event) -> None:
            work.progress(event)
            sender.send(_message(adapter.write_bytes("EVENT", event.to_json())))

        arrival = adapter.read_arrival(request)
        taken = self.pipeline.take(*adapter.read_request(request))
        work.received(taken.media)
        resolved = self.admitted(taken, arrival, queue=None)
        work.begins(work_of(resolved, len(taken.presented.token_ids), self.pipeline.manifest.dimensions))
        sender.send(_message(adapter.write_bytes("RESOLVED", resolved.model_dump_json())))
        clips = self.pipeline.generate(taken, report, Cancellation(sender.is_cancelled))
        for index, mp4 in enumerate(clips):
            work.made(mp4, taken.resolved.seconds)
            message = _message(pb_utils.Tensor("INDEX", np.array([index])), adapter.write_bytes("MP4", mp4))
            sender.send(message, flags=FINAL if index == taken.resolved.outputs - 1 else MORE)


def _message(*tensors: pb_utils.Tensor) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(list(tensors))
