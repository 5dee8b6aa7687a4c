"""A gRPC client of the served models: a prompt and parameters in, an MP4 out, with progress and cancellation."""

from __future__ import annotations

import json
import queue
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import InferenceServerException

from triton_repo.messages import (
    ClientError,
    Failure,
    Files,
    call_options,
    check_outputs,
    client_error,
    is_final,
    optional_bytes,
    output_index,
    request_inputs,
    required_text,
    told,
)
from triton_repo.names import ENSEMBLE, NORMAL, PREPARE, STREAM

__all__ = ["Client", "ClientError", "Failure", "Files", "Generated", "Progress"]

Progress = Callable[[Mapping[str, Any]], None]
"""Receives each progress event of a request as the server sent it."""

Fragments = Callable[[int, bytes], None]
"""Receives the pieces of fragmented MP4s as they come: the index of the output, and its next bytes."""

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Generated:
    """Finished clips: the bytes of each output's MP4 and the request as the server resolved it.

    first_fragment: seconds from the call to the first piece of a fragmented MP4; None where none came by itself.
    """

    mp4s: tuple[bytes, ...]
    resolved: Mapping[str, Any]
    first_fragment: float | None = None

    @property
    def mp4(self) -> bytes:
        """The first output."""
        return self.mp4s[0]


class Client:
    """Talks to one server. Use it as a context manager; it serves one thread."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = InferenceServerClient(url)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def is_ready(self, model: str) -> bool:
        """Whether the model can be called. Raises ClientError where no server answers."""
        with told():
            return self._client.is_model_ready(model)

    def resolve(
        self,
        prompt: str,
        params: Mapping[str, Any],
        timeout: float | None = None,
        files: Files | None = None,
        request_id: str = "",
    ) -> Mapping[str, Any]:
        """The request with every default and derived size filled in, and what the server expects it to take.

        Nothing is generated. `request_id`: the name of the request in the server's log. Raises ClientError.
        """
        outputs = [InferRequestedOutput("RESOLVED")]
        with told():
            inputs = request_inputs(prompt, params, files)
            # Not MEDIA: the files would come back.
            result = self._client.infer(PREPARE, inputs, outputs=outputs, client_timeout=timeout, request_id=request_id)
        return json.loads(required_text(result, "RESOLVED"))

    def generate_unary(
        self, prompt: str, params: Mapping[str, Any], timeout: float | None = None, files: Files | None = None
    ) -> Generated:
        """One call to the ensemble `h3`: no progress, and Triton finishes a step that has begun when it is cancelled.

        `timeout` is in seconds. Raises ClientError.
        """
        inputs, request_id = request_inputs(prompt, params, files), _new_id()
        with told():
            result = self._client.infer(ENSEMBLE, inputs, client_timeout=timeout, request_id=request_id)
        resolved = json.loads(required_text(result, "RESOLVED"))
        mp4s = result.as_numpy("MP4")
        return Generated(_complete({} if mp4s is None else dict(enumerate(mp4s)), resolved), resolved)

    def generate(
        self,
        prompt: str,
        params: Mapping[str, Any],
        progress: Progress = lambda event: None,
        timeout: float | None = None,
        files: Files | None = None,
        priority: int = NORMAL,
        fragments: Fragments = lambda index, piece: None,
    ) -> Generated:
        """A call to resolve the request, then one to `h3_stream`; `progress` and `fragments` are called in this thread.

        `fragments` is called where the request asks for the container fragmented. Any exception in this thread, such as
        KeyboardInterrupt or one that a callback raises, cancels the request on the server, which stops within one step.
        `timeout` is in seconds for the whole request. Raises ClientError.
        """
        started = time.monotonic()
        deadline = None if timeout is None else started + timeout
        # Errors of a stream have no codes, and one to nowhere would only say that it is broken: this call says why.
        request_id = _new_id()
        resolved = self.resolve(prompt, params, timeout, files, request_id)
        options = call_options(resolved, request_id, priority)
        mp4s: dict[int, bytearray] = defaultdict(bytearray)
        first: float | None = None
        with self._stream(request_inputs(prompt, params, files), options) as messages:
            for result in messages.until_final(deadline):
                if (text := optional_bytes(result, "EVENT")) is not None:
                    progress(json.loads(text))
                if (mp4 := optional_bytes(result, "MP4")) is not None:
                    mp4s[output_index(result)] += mp4
                if (piece := optional_bytes(result, "FRAGMENT")) is not None:
                    first = time.monotonic() - started if first is None else first
                    mp4s[output_index(result)] += piece
                    fragments(output_index(result), piece)
        return Generated(_complete(mp4s, resolved), resolved, first)

    @contextmanager
    def _stream(self, inputs: list[InferInput], options: Mapping[str, Any]) -> Iterator[_Messages]:
        messages = _Messages()
        # The header triton_grpc_error would give errors their codes, but Triton 2.51 may die of such an error.
        self._client.start_stream(messages.put)
        try:
            with told():
                self._client.async_stream_infer(STREAM, inputs, enable_empty_final_response=True, **options)
            yield messages
        finally:
            # Triton 2.51 may die of a cancellation that meets a request as it ends (its issue 7368, mended in 2.53).
            self._client.stop_stream(cancel_requests=not messages.ended)


class _Messages:
    """What the server says on a stream. `ended`: the last answer or an error has been seen, nothing more will come."""

    def __init__(self) -> None:
        self.ended = False
        self._queue: queue.SimpleQueue[tuple[InferResult | None, InferenceServerException | None]] = queue.SimpleQueue()

    def put(self, result: InferResult | None, error: InferenceServerException | None) -> None:
        """Takes a message; tritonclient calls this in its own thread."""
        self._queue.put((result, error))

    def until_final(self, deadline: float | None) -> Iterator[InferResult]:
        """The answers up to the final one. Raises ClientError, also when `deadline` (of time.monotonic) passes."""
        while not self.ended:
            result, error = self._next(deadline)
            if error is not None:
                self.ended = True
                raise client_error(error)
            assert result is not None
            self.ended = is_final(result)
            yield result

    def _next(self, deadline: float | None) -> tuple[InferResult | None, InferenceServerException | None]:
        while deadline is None or time.monotonic() < deadline:
            try:
                # Not one long wait: a blocked main thread would see Ctrl-C only when the next message arrives.
                return self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        raise ClientError(Failure.TIMEOUT, "the request took longer than its timeout and was cancelled")


def _new_id() -> str:
    """A name for a request that no other has."""
    return secrets.token_hex(8)


def _complete(mp4s: Mapping[int, bytes | bytearray], resolved: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The MP4 of every output, in order."""
    check_outputs(mp4s, resolved["outputs"])
    return tuple(bytes(mp4s[index]) for index in sorted(mp4s))
