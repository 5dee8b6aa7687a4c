"""A gRPC client of the served models: a prompt and parameters in, an MP4 out, with progress and cancellation."""

from __future__ import annotations

import json
import queue
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import InferenceServerException

from runtime.kinds import is_unicode
from runtime.media.facts import Kind
from runtime.reference_kinds import INPUTS
from runtime.refusal import RequestError
from runtime.request import check_total, parse_prompt
from triton_repo.names import ENSEMBLE, PREPARE, STREAM

Progress = Callable[[Mapping[str, Any]], None]
"""Receives each progress event of a request as the server sent it."""

Files = Mapping[Kind, Sequence[bytes]]
"""The files of a request, each whole, by kind; a kind that has none may be left out."""

Fragments = Callable[[int, bytes], None]
"""Receives the pieces of fragmented MP4s as they come: the index of the output, and its next bytes."""

POLL_SECONDS = 0.1

REFUSAL = re.compile(r"\S+: (got .*|missing); ", re.DOTALL)
"""How the text of a RequestError begins, which is all that tells one on a stream."""


class Failure(Enum):
    """Why a request did not end with an MP4; the values are gRPC's names."""

    INVALID = "INVALID_ARGUMENT"
    CANCELLED = "CANCELLED"
    TIMEOUT = "DEADLINE_EXCEEDED"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


class ClientError(Exception):
    """A request failed. `failure` says how, the text is the server's own."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


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

    def resolve(
        self, prompt: str, params: Mapping[str, Any], timeout: float | None = None, files: Files | None = None
    ) -> Mapping[str, Any]:
        """The request with every default and derived size filled in; nothing is generated. Raises ClientError."""
        outputs = [InferRequestedOutput("RESOLVED")]
        with _told():
            inputs = _inputs(prompt, params, files)
            # Not MEDIA: the files would come back.
            result = self._client.infer(PREPARE, inputs, outputs=outputs, client_timeout=timeout)
        return json.loads(_text(result, "RESOLVED"))

    def generate_unary(
        self, prompt: str, params: Mapping[str, Any], timeout: float | None = None, files: Files | None = None
    ) -> Generated:
        """One call to the ensemble `h3`: no progress, and Triton finishes a step that has begun when it is cancelled.

        `timeout` is in seconds. Raises ClientError.
        """
        with _told():
            result = self._client.infer(ENSEMBLE, _inputs(prompt, params, files), client_timeout=timeout)
        resolved = json.loads(_text(result, "RESOLVED"))
        mp4s = result.as_numpy("MP4")
        return Generated(_complete({} if mp4s is None else dict(enumerate(mp4s)), resolved), resolved)

    def generate(
        self,
        prompt: str,
        params: Mapping[str, Any],
        progress: Progress = lambda event: None,
        timeout: float | None = None,
        files: Files | None = None,
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
        resolved = self.resolve(prompt, params, timeout, files)
        mp4s: dict[int, bytearray] = defaultdict(bytearray)
        first: float | None = None
        with self._stream(_inputs(prompt, params, files)) as messages:
            for result in messages.until_final(deadline):
                if (text := _optional(result, "EVENT")) is not None:
                    progress(json.loads(text))
                if (mp4 := _optional(result, "MP4")) is not None:
                    mp4s[_index(result)] += mp4
                if (piece := _optional(result, "FRAGMENT")) is not None:
                    first = time.monotonic() - started if first is None else first
                    mp4s[_index(result)] += piece
                    fragments(_index(result), piece)
        return Generated(_complete(mp4s, resolved), resolved, first)

    @contextmanager
    def _stream(self, inputs: list[InferInput]) -> Iterator[_Messages]:
        messages = _Messages()
        # The header triton_grpc_error would give errors their codes, but Triton 2.51 may die of such an error.
        self._client.start_stream(messages.put)
        try:
            with _told():
                self._client.async_stream_infer(STREAM, inputs, enable_empty_final_response=True)
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
                raise _client_error(error)
            assert result is not None
            self.ended = result.get_response().parameters["triton_final_response"].bool_param
            yield result

    def _next(self, deadline: float | None) -> tuple[InferResult | None, InferenceServerException | None]:
        while deadline is None or time.monotonic() < deadline:
            try:
                # Not one long wait: a blocked main thread would see Ctrl-C only when the next message arrives.
                return self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        raise ClientError(Failure.TIMEOUT, "the request took longer than its timeout and was cancelled")


def _complete(mp4s: Mapping[int, bytes | bytearray], resolved: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The MP4 of every output, in order."""
    if sorted(mp4s) != list(range(resolved["outputs"])):
        raise ClientError(Failure.INTERNAL, "the server ended the request without an MP4; its log says why")
    return tuple(bytes(mp4s[index]) for index in sorted(mp4s))


def _inputs(prompt: str, params: Mapping[str, Any], files: Files | None) -> list[InferInput]:
    if not is_unicode(prompt):
        raise _unsendable(prompt)
    sent = [(INPUTS[kind], elements) for kind, elements in (files or {}).items() if elements]
    _check_size([element for _, elements in sent for element in elements])
    media = [_elements(name, elements) for name, elements in sent]
    return [_elements("PROMPT", [prompt.encode()]), _elements("PARAMS", [json.dumps(params).encode()]), *media]


def _check_size(files: Sequence[bytes]) -> None:
    """Refuses what the server would refuse, before it is sent: gRPC takes no message of 2 GiB."""
    try:
        check_total([sum(map(len, files))], ["references"])
    except RequestError as error:
        raise ClientError(Failure.INVALID, str(error)) from None


def _unsendable(prompt: str) -> ClientError:
    """Why a text that has no UTF-8 is refused, in the words of the request's own check."""
    try:
        parse_prompt(prompt)
    except RequestError as error:
        return ClientError(Failure.INVALID, str(error))
    raise AssertionError("the check lets a prompt pass that has no UTF-8")


def _elements(name: str, values: Sequence[bytes]) -> InferInput:
    tensor = InferInput(name, [len(values)], "BYTES")
    elements = np.empty(len(values), dtype=np.object_)
    elements[:] = values
    tensor.set_data_from_numpy(elements)
    return tensor


def _optional(result: InferResult, name: str) -> bytes | None:
    array = result.as_numpy(name)
    return None if array is None or array.size == 0 else array[0]


def _index(result: InferResult) -> int:
    return int(result.as_numpy("INDEX")[0])


def _bytes(result: InferResult, name: str) -> bytes:
    value = _optional(result, name)
    if value is None:
        raise ClientError(Failure.INTERNAL, f"the server's answer has no {name}")
    return value


def _text(result: InferResult, name: str) -> str:
    return _bytes(result, name).decode()


@contextmanager
def _told() -> Iterator[None]:
    """Turns tritonclient's errors into ours."""
    try:
        yield
    except InferenceServerException as error:
        raise _client_error(error) from error


def _client_error(error: InferenceServerException) -> ClientError:
    message = str(error.message())
    if error.status() is not None:
        code = str(error.status()).removeprefix("StatusCode.")
        known = {failure.value: failure for failure in Failure} | {"NOT_FOUND": Failure.UNAVAILABLE}
        failure = known.get(code, Failure.INTERNAL)
    else:
        failure = _uncoded_failure(message)
    if failure is Failure.UNAVAILABLE and "connect" in message:
        message = f"no server answers: {message}; start one with: h3trt serve"
    return ClientError(failure, message)


def _uncoded_failure(message: str) -> Failure:
    """What comes over a stream has no code: tell it by its text."""
    if "Exceeds maximum queue size" in message or "no available versions" in message or "timeout expired" in message:
        return Failure.UNAVAILABLE
    if message.startswith("cancelled"):
        return Failure.CANCELLED
    refused = "input" in message or REFUSAL.match(message)
    return Failure.INVALID if refused else Failure.INTERNAL
