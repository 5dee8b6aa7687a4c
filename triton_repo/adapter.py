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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from runtime.events import Cancelled
from runtime.media.facts import Kind
from runtime.media.source import MediaPolicy
from runtime.reference_kinds import INPUTS
from runtime.request import RequestError, parse_params
from triton_repo.names import (
    CACHE_METRICS,
    CACHE_PARAMETER,
    MEDIA_HOSTS_PARAMETER,
    MEDIA_ROOT_PARAMETER,
    RUNNING_METRIC,
    STORE_PARAMETER,
)


@dataclass(frozen=True)
class Settings:
    """What the model's configuration says: the engine store, where media may come from, and bytes of the cache."""

    store: Path
    media: MediaPolicy
    condition_cache: int

    @staticmethod
    def of(parameters: Mapping[str, str]) -> Settings:
        """The settings that `RepositorySettings.parameters` wrote."""
        hosts, root = parameters[MEDIA_HOSTS_PARAMETER], parameters[MEDIA_ROOT_PARAMETER]
        media = MediaPolicy(url_hosts=tuple(hosts.split(",")) if hosts else (), root=Path(root) if root else None)
        return Settings(Path(parameters[STORE_PARAMETER]), media, int(parameters[CACHE_PARAMETER]))


class Model(ABC):
    """Triton's life cycle around one piece of the pipeline; a subclass opens what it needs and executes requests."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the model. Triton refuses to load it when this raises, with the exception's text (a StoreError, say)."""
        self.name = args["model_name"]
        parameters = json.loads(args["model_config"])["parameters"]
        self.settings = Settings.of({name: value["string_value"] for name, value in parameters.items()})
        self.open(self.settings.store)
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


class CacheMetrics:
    """The counts of a cache of conditions in the server's metrics."""

    def __init__(self, model: str) -> None:
        kinds = {"hits": pb_utils.MetricFamily.COUNTER, "misses": pb_utils.MetricFamily.COUNTER}
        # Triton forgets a metric whose family is no longer held.
        self._families = {
            count: pb_utils.MetricFamily(
                name=name,
                description=f"{count} of the cache of encoded prompts and references",
                kind=kinds.get(count, pb_utils.MetricFamily.GAUGE),
            )
            for count, name in CACHE_METRICS.items()
        }
        self._metrics = {count: family.Metric(labels={"model": model}) for count, family in self._families.items()}

    def show(self, counts: Mapping[str, int]) -> None:
        """Publishes the counts; those of hits and misses only grow."""
        for count, metric in self._metrics.items():
            metric.increment(counts[count] - metric.value())


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


def read_request(request: pb_utils.InferenceRequest) -> tuple[bytes, dict[str, Any], dict[Kind, list[bytes]]]:
    """PROMPT as it came, PARAMS as an object and the files by kind, for `take`. Raises RequestError."""
    prompt, params = (read_bytes(request, name) for name in ("PROMPT", "PARAMS"))
    files = {kind: read_elements(request, name) for kind, name in INPUTS.items()}
    return prompt, parse_params(params), files


def read_elements(request: pb_utils.InferenceRequest, name: str) -> list[bytes]:
    """All elements of a BYTES tensor, none where it was left out. Raises RequestError for bytes that hold no such."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return []
    try:
        return [bytes(element) for element in tensor.as_numpy().reshape(-1)]
    except Exception as error:
        raise RequestError(name, "unreadable bytes", "must be a BYTES tensor") from error


def read_bytes(request: pb_utils.InferenceRequest, name: str) -> bytes:
    """The one element of a BYTES tensor. Raises RequestError where the tensor's bytes hold no such element."""
    elements = read_elements(request, name)
    if len(elements) != 1:
        raise RequestError(name, f"{len(elements)} elements", "must be a BYTES tensor of one element")
    return elements[0]


def write_bytes(name: str, *values: bytes | str) -> pb_utils.Tensor:
    """A BYTES tensor of these elements."""
    data = [value.encode() if isinstance(value, str) else value for value in values]
    # Not np.array(data): it would make an array of characters of what has one length.
    elements = np.empty(len(data), dtype=np.object_)
    elements[:] = data
    return pb_utils.Tensor(name, elements)


def check_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Raise RequestError unless an intermediate tensor has the shape that the request's sizes ask for."""
    if tuple(shape) != tuple(expected):
        raise RequestError(name, str(list(shape)), "must have the shape of the resolved request", str(list(expected)))


def read_array(request: pb_utils.InferenceRequest, name: str) -> NDArray[Any]:
    """An input tensor of numbers as an array."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def read_tensor(request: pb_utils.InferenceRequest, name: str) -> Any:
    """An input tensor, for `torch.from_dlpack`; it shares the request's memory."""
    return pb_utils.get_input_tensor_by_name(request, name)


def write_tensor(name: str, tensor: Any) -> pb_utils.Tensor:
    """An output tensor that shares the memory of a contiguous CPU tensor."""
    return pb_utils.Tensor.from_dlpack(name, tensor)
