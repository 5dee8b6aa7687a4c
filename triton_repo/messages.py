"""What goes to the served models and what comes back, whichever client sends it: inputs, messages, failures."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput, InferResult
from tritonclient.utils import InferenceServerException

from runtime.kinds import is_unicode
from runtime.media.facts import Kind
from runtime.rank_errors import LOST
from runtime.reference_kinds import INPUTS
from runtime.refusal import RequestError
from runtime.request import check_total, parse_prompt
from triton_repo.names import ARRIVAL, NORMAL

Files = Mapping[Kind, Sequence[bytes]]
"""The files of a request, each whole, by kind; a kind that has none may be left out."""

REFUSAL = re.compile(r"(?P<field>\S+): (got .*|missing); ", re.DOTALL)
"""How the text of a RequestError begins, which is all that tells one on a stream."""

LOST_MODEL = re.compile(r"Stub process .* is not healthy")
"""What Triton says while a model's process is gone, until the server has been started again."""


NO_SHARED_MEMORY = re.compile(r"shared memory pool|allocate shared memory|No space left on device", re.IGNORECASE)
"""What Triton's Python backend says when /dev/shm is full, together with names that are no business of clients."""


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


def request_inputs(prompt: str, params: Mapping[str, Any], files: Files | None) -> list[InferInput]:
    """The input tensors of a request. Raises ClientError for one that could not be sent."""
    if not is_unicode(prompt):
        raise _unsendable(prompt)
    sent = [(INPUTS[kind], elements) for kind, elements in (files or {}).items() if elements]
    _check_size([element for _, elements in sent for element in elements])
    media = [_elements(name, elements) for name, elements in sent]
    return [_elements("PROMPT", [prompt.encode()]), _elements("PARAMS", [json.dumps(params).encode()]), *media]


def call_options(resolved: Mapping[str, Any], request_id: str, priority: int = NORMAL) -> dict[str, Any]:
    """What goes with a call of `h3_stream` beside the inputs, for a request as h3_prepare has resolved it.

    Its id, its priority, when it came, and its deadline as the longest that it may wait.
    """
    options: dict[str, Any] = {"request_id": request_id, "priority": priority}
    if resolved.get("estimate"):
        options["parameters"] = {ARRIVAL: resolved["estimate"][ARRIVAL]}
    if resolved.get("deadline"):
        options["timeout"] = round(resolved["deadline"] * 1e6)
    return options


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


def optional_bytes(result: InferResult, name: str) -> bytes | None:
    """The one element of a BYTES output, None where the message does not have it."""
    array = result.as_numpy(name)
    return None if array is None or array.size == 0 else array[0]


def _bytes(result: InferResult, name: str) -> bytes:
    value = optional_bytes(result, name)
    if value is None:
        raise ClientError(Failure.INTERNAL, f"the server's answer has no {name}")
    return value


def required_text(result: InferResult, name: str) -> str:
    """The one element of a BYTES output as text. Raises ClientError where the message does not have it."""
    return _bytes(result, name).decode()


def output_index(result: InferResult) -> int:
    """Which output the MP4 or the fragment of a message is of."""
    return int(result.as_numpy("INDEX")[0])


def is_final(result: InferResult) -> bool:
    """Whether this is the last message of a stream."""
    return result.get_response().parameters["triton_final_response"].bool_param


def check_outputs(indices: Collection[int], outputs: int) -> None:
    """Raises ClientError unless a stream that has ended brought the clip of every output."""
    if sorted(indices) != list(range(outputs)):
        raise ClientError(Failure.INTERNAL, "the server ended the request without an MP4; its log says why")


@contextmanager
def told() -> Iterator[None]:
    """Turns tritonclient's errors into ours."""
    try:
        yield
    except InferenceServerException as error:
        raise client_error(error) from error


def client_error(error: InferenceServerException) -> ClientError:
    """An error of tritonclient as one of ours, with the server's text."""
    message = str(error.message())
    if error.status() is not None:
        code = str(error.status()).removeprefix("StatusCode.")
        known = {failure.value: failure for failure in Failure} | {"NOT_FOUND": Failure.UNAVAILABLE}
        failure = known.get(code, Failure.INTERNAL)
    else:
        failure = _uncoded_failure(message)
    if LOST_MODEL.search(message):
        failure = Failure.UNAVAILABLE
    if failure is Failure.INTERNAL and NO_SHARED_MEMORY.search(message):
        failure = Failure.UNAVAILABLE
        message = "the request needs more shared memory than the server has; give it more: docker run --shm-size=1g"
    if failure is Failure.UNAVAILABLE and "connect" in message:
        message = f"no server answers: {message}; start one with: h3trt serve"
    return ClientError(failure, message)


_QUEUE_FULL, _EXPIRED, _LATE = "Exceeds maximum queue size", "timeout expired", "late: "
_IMPOSSIBLE = re.compile(r"deadline: .* the request takes about ")


def is_late(error: ClientError) -> bool:
    """Whether the server refused a request because of its deadline, which a quieter server could meet."""
    return error.failure is Failure.UNAVAILABLE and (str(error).startswith(_LATE) or _EXPIRED in str(error))


def is_impossible(error: ClientError) -> bool:
    """Whether the server refused a request because of its deadline, which it could never meet."""
    return error.failure is Failure.INVALID and _IMPOSSIBLE.match(str(error)) is not None


def is_passing(error: ClientError) -> bool:
    """Whether the same request may be taken a little later: the server's queue is full, or it is being started."""
    return error.failure is Failure.UNAVAILABLE and not is_late(error)


def _uncoded_failure(message: str) -> Failure:
    """What comes over a stream has no code: tell it by its text."""
    if _QUEUE_FULL in message or "no available versions" in message or _EXPIRED in message:
        return Failure.UNAVAILABLE
    if message.startswith((_LATE, LOST)):
        return Failure.UNAVAILABLE
    if message.startswith("cancelled"):
        return Failure.CANCELLED
    refused = "input" in message or REFUSAL.match(message)
    return Failure.INVALID if refused else Failure.INTERNAL
