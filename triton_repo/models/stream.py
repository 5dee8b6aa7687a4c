"""h3_stream: the whole pipeline in one decoupled model, with progress events and cancellation within one step.

`execute` blocks on purpose: requests that it has not taken wait in Triton's queue, where their number is bounded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from runtime.events import Cancellation, Event
from runtime.pipeline import STAGES
from runtime.rehearsal import rehearsals, rehearse
from triton_repo import adapter

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
MORE = 0


class TritonPythonModel(adapter.Model):
    """PROMPT, PARAMS, IMAGES, VIDEOS, AUDIOS -> messages: RESOLVED; many with EVENT; INDEX and MP4 of each output.

    Where the container is fragmented, an output's MP4 comes as messages of INDEX and FRAGMENT, as they are made, and an
    empty message is the last. An error ends them.
    """

    def open(self, store: Path) -> None:
        """Open the engines of all stages."""
        self.pipeline = self.open_pipeline(store, STAGES)
        self.cache = self.pipeline.cache
        self.warm(rehearsals(self.pipeline.manifest), partial(rehearse, self.pipeline))

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
        messages = _Messages(sender)

        def report(event: Event) -> None:
            work.progress(event)
            messages.send(adapter.write_bytes("EVENT", event.to_json()))

        arrival = adapter.read_arrival(request)
        taken = self.pipeline.take(*adapter.read_request(request))
        work.received(taken.media)
        resolved = self.admitted(taken, arrival, queue=None)
        work.begins(self.works(taken))
        messages.send(adapter.write_bytes("RESOLVED", resolved.model_dump_json()))
        fragmented = resolved.media.container == "fragmented"
        pieces = messages.send_fragment if fragmented else _keep
        clips = self.pipeline.generate(taken, report, Cancellation(sender.is_cancelled), pieces)
        for index, mp4 in enumerate(clips):
            work.made(mp4, resolved.seconds)
            if not fragmented:
                last = index == resolved.outputs - 1
                messages.send(_index(index), adapter.write_bytes("MP4", mp4), flags=FINAL if last else MORE)
        if fragmented:
            work.first_fragment(messages.first_fragment)
            sender.send(flags=FINAL)


class _Messages:
    """A request's messages. Events come from the thread that decodes, fragments from the one that encodes."""

    def __init__(self, sender: Any) -> None:
        self.first_fragment = 0.0
        """Seconds until it left."""
        self._sender = sender
        self._started = time.monotonic()
        self._one_at_a_time = threading.Lock()

    def send(self, *tensors: pb_utils.Tensor, flags: int = MORE) -> None:
        with self._one_at_a_time:
            self._sender.send(pb_utils.InferenceResponse(list(tensors)), flags=flags)

    def send_fragment(self, index: int, piece: bytes) -> None:
        self.send(_index(index), adapter.write_bytes("FRAGMENT", piece))
        self.first_fragment = self.first_fragment or time.monotonic() - self._started


def _index(index: int) -> pb_utils.Tensor:
    return pb_utils.Tensor("INDEX", np.array([index]))


def _keep(index: int, piece: bytes) -> None:
    """An MP4 of one piece leaves when the pipeline gives it."""
