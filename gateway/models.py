"""The served models over asynchronous gRPC: a dry run by `h3_prepare`, a generation by `h3_stream`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from tritonclient.grpc import MAX_GRPC_MESSAGE_SIZE, InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from runtime.references import sha256_of
from triton_repo.messages import (
    Files,
    call_options,
    client_error,
    is_final,
    optional_bytes,
    output_index,
    request_inputs,
    required_text,
    told,
)
from triton_repo.names import NORMAL, PREPARE, STREAM

_CHANNEL = [
    # Longest pause before another try to reach a server that went away; gRPC's own is two minutes.
    ("grpc.max_reconnect_backoff_ms", 1000),
    # What is given here replaces tritonclient's own options: without these two a message could have 4 MB.
    ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_SIZE),
    ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_SIZE),
]


@dataclass(frozen=True)
class Asked:
    """A request for the models: the prompt, the parameters object, the files by kind, how urgent it is."""

    prompt: str
    params: Mapping[str, Any]
    files: Files
    priority: int = NORMAL

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(len(one) for elements in self.files.values() for one in elements)

    def fingerprint(self) -> str:
        """What two requests have in common if and only if they ask for the same."""
        text = json.dumps([self.prompt, self.params, self.priority], sort_keys=True)
        digests = [(kind, [sha256_of(one) for one in elements]) for kind, elements in sorted(self.files.items())]
        return sha256_of(json.dumps([text, digests]).encode())


@dataclass(frozen=True)
class Message:
    """What `h3_stream` says: a progress event, or the next bytes of an output's MP4, which may be all of them."""

    event: Mapping[str, Any] | None = None
    index: int = 0
    piece: bytes | None = None


class Models(Protocol):
    """What the gateway needs of a server. Calls raise ClientError."""

    async def open(self) -> None:
        """Gets ready for calls; the server need not run yet."""

    async def close(self) -> None:
        """Ends all calls."""

    async def resolve(self, asked: Asked, seconds: float, request_id: str) -> Mapping[str, Any]:
        """The request with every choice made and an estimate of what it takes; nothing is generated."""

    def generate(self, asked: Asked, resolved: Mapping[str, Any], request_id: str) -> AsyncIterator[Message]:
        """The messages of one generation, whose request `resolve` has resolved.

        Closing the iterator before its end cancels on the server.
        """

    async def ready(self) -> bool:
        """Whether both models can be called."""


class TritonModels:
    """The models of a Triton server."""

    def __init__(self, url: str) -> None:
        """url: host:port of the gRPC endpoint."""
        self._url = url

    async def open(self) -> None:
        """See Models."""
        self._client = InferenceServerClient(self._url, channel_args=_CHANNEL)

    async def close(self) -> None:
        """See Models."""
        await self._client.close()

    async def resolve(self, asked: Asked, seconds: float, request_id: str) -> Mapping[str, Any]:
        """See Models."""
        outputs = [InferRequestedOutput("RESOLVED")]
        with told():
            inputs = request_inputs(asked.prompt, asked.params, asked.files)
            # Not MEDIA: the files would come back.
            result = await self._client.infer(
                PREPARE, inputs, outputs=outputs, client_timeout=seconds, request_id=request_id
            )
        return json.loads(required_text(result, "RESOLVED"))

    async def generate(self, asked: Asked, resolved: Mapping[str, Any], request_id: str) -> AsyncIterator[Message]:
        """See Models."""
        inputs = request_inputs(asked.prompt, asked.params, asked.files)
        call = self._client.stream_infer(_one(inputs, call_options(resolved, request_id, asked.priority)))
        # Triton 2.51 may die of a cancellation that meets a request as it ends, so that is never cancelled.
        ended = False
        try:
            with _told_of_stream():
                async for result, error in call:
                    ended = error is not None or is_final(result)
                    if error is not None:
                        raise client_error(error)
                    yield _message(result)
            ended = True
        finally:
            if not ended:
                call.cancel()

    async def ready(self) -> bool:
        """See Models."""
        try:
            return all([await self._client.is_model_ready(model) for model in (PREPARE, STREAM)])
        except (InferenceServerException, grpc.RpcError):
            return False


def _message(result: InferResult) -> Message:
    event, mp4, fragment = (optional_bytes(result, name) for name in ("EVENT", "MP4", "FRAGMENT"))
    piece = fragment if mp4 is None else mp4
    index = 0 if piece is None else output_index(result)
    return Message(None if event is None else json.loads(event), index, piece)


async def _one(inputs: list[InferInput], options: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The one request of a stream, which is then closed on this side: Triton cannot stop while one is open."""
    yield {"model_name": STREAM, "inputs": inputs, **options}


@contextmanager
def _told_of_stream() -> Iterator[None]:
    """Turns what gRPC itself raises on a stream into our errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        told_error = InferenceServerException(error.details() or "the stream broke", str(error.code()))
        raise client_error(told_error) from error
