"""What the models share: reading tensors, answering, and turning exceptions into Triton's error codes.

Only Triton's Python stub can import this module. It imports no torch, and `h3_prepare` starts without it.
"""

from __future__ import annotations

import json
import secrets
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from runtime.events import Cancelled
from runtime.request import RequestError, parse_params
from triton_repo.names import RUNNING_METRIC, STORE_PARAMETER


class Model(ABC):
    """Triton's life cycle around one piece of the pipeline; a subclass opens what it needs and executes requests."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the model. Triton refuses to load it when this raises, with the exception's text (a StoreError, say)."""
        self.name = args["model_name"]
        self.open(store_path(args))
        # Triton's own metrics count what waits for a model but not what runs in it; draining needs both.
        self._running_family = pb_utils.MetricFamily(
            name=RUNNING_METRIC,
            description="Requests that the model is working on",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self._running = self._running_family.Metric(labels={"model": self.name})

    @abstractmethod
    def open(self, store: Path) -> None:
        """Open what the model needs of the engine store at `store`."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request as running in the server's metrics."""
        self._running.increment(1)
        try:
            yield
        finally:
            self._running.increment(-1)

    def error(self, error: Exception) -> pb_utils.TritonError:
        """How `error` is told to the client; one that is no fault of the request is logged with its traceback."""
        if isinstance(error, RequestError):
            return pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
        if isinstance(error, Cancelled):
            return pb_utils.TritonError(str(error), pb_utils.TritonError.CANCELLED)
        incident = secrets.token_hex(4)
        pb_utils.Logger.log_error(f"{self.name}: incident {incident}\n{''.join(traceback.format_exception(error))}")
        message = f"{self.name} failed with {type(error).__name__}; the server's log has the details under {incident}"
        return pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL)


class UnaryModel(Model):
    """A model that gives one answer to a request."""

    @abstractmethod
    def run(self, request: pb_utils.InferenceRequest) -> list[pb_utils.Tensor]:
        """The output tensors of one request."""

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """One answer for each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        with self.counted():
            try:
                return pb_utils.InferenceResponse(self.run(request))
            except Exception as error:
                return pb_utils.InferenceResponse(error=self.error(error))


def store_path(args: Mapping[str, str]) -> Path:
    """The engine store that the model's configuration names."""
    return Path(json.loads(args["model_config"])["parameters"][STORE_PARAMETER]["string_value"])


def read_request(request: pb_utils.InferenceRequest) -> tuple[bytes, dict[str, Any]]:
    """PROMPT as it came and PARAMS as an object, for `resolve`. Raises RequestError."""
    prompt, params = (read_bytes(request, name) for name in ("PROMPT", "PARAMS"))
    return prompt, parse_params(params)


def read_bytes(request: pb_utils.InferenceRequest, name: str) -> bytes:
    """The one element of a BYTES tensor. Raises RequestError where the tensor's bytes hold no such element."""
    try:
        elements = pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
    except Exception as error:
        raise RequestError(name, "unreadable bytes", "must be a BYTES tensor of one element") from error
    if len(elements) != 1:
        raise RequestError(name, f"{len(elements)} elements", "must be a BYTES tensor of one element")
    return bytes(elements[0])


def write_bytes(name: str, value: bytes | str) -> pb_utils.Tensor:
    """A BYTES tensor of one element."""
    data = value.encode() if isinstance(value, str) else value
    return pb_utils.Tensor(name, np.array([data], dtype=np.object_))


def check_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Raise RequestError unless an intermediate tensor has the shape that the request's sizes ask for."""
    if tuple(shape) != tuple(expected):
        raise RequestError(name, str(list(shape)), "must have the shape of the resolved request", str(list(expected)))


def read_tensor(request: pb_utils.InferenceRequest, name: str) -> Any:
    """An input tensor, for `torch.from_dlpack`; it shares the request's memory."""
    return pb_utils.get_input_tensor_by_name(request, name)


def write_tensor(name: str, tensor: Any) -> pb_utils.Tensor:
    """An output tensor that shares the memory of a contiguous CPU tensor."""
    return pb_utils.Tensor.from_dlpack(name, tensor)
