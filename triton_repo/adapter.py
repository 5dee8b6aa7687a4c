"""What the models share: reading tensors, answering, and turning exceptions into Triton's error codes.

Only Triton's Python stub can import this module. It imports no torch, and `h3_prepare` starts without it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from engines.store import Manifest
from runtime import allocation
from runtime.estimate import Queue, WorkStage
from runtime.events import Cancelled, Event
from runtime.forecast import Forecaster, Late
from runtime.intake import Taken
from runtime.media.facts import Kind
from runtime.media.source import MediaPolicy
from runtime.rank_errors import RankLost
from runtime.reference_kinds import INPUTS
from runtime.request import RequestError, Resolved, parse_params
from runtime.timings import Recorder, identity
from runtime.work import Work as WorkAmount
from runtime.work import work_of
from triton_repo import metric_table as table
from triton_repo.control import UNREACHABLE, read_metrics
from triton_repo.logs import Log, set_up
from triton_repo.metric_table import Metric
from triton_repo.names import (
    ARRIVAL,
    CACHE_PARAMETER,
    DEVICE_MODELS,
    MEDIA_HOSTS_PARAMETER,
    MEDIA_ROOT_PARAMETER,
    METRICS_VARIABLE,
    STALL_PARAMETER,
    STATE_PARAMETER,
    STORE_PARAMETER,
    WARM,
    WARM_PARAMETER,
)
from triton_repo.queue_state import queue_of
from triton_repo.serving_state import ServingState
from triton_repo.shared_ranks import folder_of, start_shared
from triton_repo.stage_clock import StageClock

if TYPE_CHECKING:
    from runtime.condition_cache import ConditionCache
    from runtime.pipeline import PipelineStage, Progress
    from runtime.ranked_pipeline import AnyPipeline, CacheThere, RankedPipeline
    from runtime.rehearsal import Rehearsal


SERVER_SECONDS = 0.5
"""Between two looks at whether tritonserver still runs."""


@dataclass(frozen=True)
class Settings:
    """What the model's configuration says.

    The engine store, where media may come from, bytes of the cache, what the server remembers, whether to run
    requests before the model is ready, and seconds after which ranks that do not move are lost.
    """

    store: Path
    media: MediaPolicy
    condition_cache: int
    state: ServingState | None
    warm: bool
    stall: float

    @staticmethod
    def of(parameters: Mapping[str, str]) -> Settings:
        """The settings that `RepositorySettings.parameters` wrote."""
        hosts, root = parameters[MEDIA_HOSTS_PARAMETER], parameters[MEDIA_ROOT_PARAMETER]
        media = MediaPolicy(url_hosts=tuple(hosts.split(",")) if hosts else (), root=Path(root) if root else None)
        state = parameters[STATE_PARAMETER]
        return Settings(
            store=Path(parameters[STORE_PARAMETER]),
            media=media,
            condition_cache=int(parameters[CACHE_PARAMETER]),
            state=ServingState(Path(state)) if state else None,
            warm=parameters[WARM_PARAMETER] == WARM,
            stall=float(parameters[STALL_PARAMETER]) or math.inf,
        )


class Metrics:
    """What one model publishes through Triton; a family and its samples begin when first used."""

    def __init__(self, model: str) -> None:
        self._model = model
        # Triton forgets a metric whose family is no longer held.
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, ...], Any] = {}

    def add(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds to a counter or a gauge."""
        self._sample(metric, labels).increment(value)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds an observation to a histogram."""
        self._sample(metric, labels).observe(value)

    def show(self, metric: Metric, value: float, **labels: str) -> None:
        """Brings a gauge, or a counter that only grows, to a value."""
        sample = self._sample(metric, labels)
        sample.increment(value - sample.value())

    def _sample(self, metric: Metric, labels: Mapping[str, str]) -> Any:
        key = (metric.name, *labels.values())
        if key not in self._metrics:
            buckets = {"buckets": list(metric.buckets)} if metric.kind == "histogram" else {}
            self._metrics[key] = self._family(metric).Metric(labels={"model": self._model, **labels}, **buckets)
        return self._metrics[key]

    def _family(self, metric: Metric) -> Any:
        if metric.name not in self._families:
            kind = getattr(pb_utils.MetricFamily, metric.kind.upper())
            family = pb_utils.MetricFamily(name=metric.name, description=metric.meaning, kind=kind)
            self._families[metric.name] = family
        return self._families[metric.name]


class Work:
    """One request in a model: counts its progress and, when it ends, publishes and logs how."""

    def __init__(self, model: str, request: str, metrics: Metrics, log: Log) -> None:
        self._model, self._metrics = model, metrics
        self._log = log.of(request=request)
        self._clock = StageClock(time.monotonic)
        self._media_seconds = 0.0
        self._outcome: str = "done"
        self._works: Mapping[WorkStage, WorkAmount] = {}
        metrics.add(table.RUNNING, 1)

    def progress(self, event: Event) -> None:
        """Counts a progress event."""
        units, seconds = self._clock(event)
        if units:
            self._metrics.add(table.UNITS, units, stage=event.stage)
        if event.stage == "denoise" and units == 1:
            self._metrics.observe(table.STEP, seconds)

    def begins(self, works: Mapping[WorkStage, WorkAmount]) -> None:
        """Says how much work the request is, so that its times say something of others."""
        self._works = works

    def received(self, files: Sequence[bytes]) -> None:
        """Counts files that came with the request."""
        self._metrics.add(table.RECEIVED, sum(map(len, files)))

    def made(self, mp4: bytes, seconds: float) -> None:
        """Counts a finished clip, of so many seconds."""
        self._metrics.add(table.SENT, len(mp4))
        self._media_seconds += seconds

    def first_fragment(self, seconds: float) -> None:
        """Counts a streamed clip whose first fragment left after so many seconds."""
        self._metrics.observe(table.FIRST_FRAGMENT, seconds)
        self._log.info("first fragment", seconds=round(seconds, 3))

    def error(self, error: Exception) -> pb_utils.TritonError:
        """How `error` is told to the client; one that is no fault of the request is logged with its traceback."""
        if isinstance(error, RequestError):
            return self._refusal("refused", error, pb_utils.TritonError.INVALID_ARG)
        if isinstance(error, Late):
            return self._refusal("late", error, pb_utils.TritonError.UNAVAILABLE)
        if isinstance(error, Cancelled):
            return self._refusal("cancelled", error, pb_utils.TritonError.CANCELLED)
        if isinstance(error, RankLost):
            return self._refusal("lost", error, pb_utils.TritonError.UNAVAILABLE, error.public)
        self._outcome = "failed"
        incident = secrets.token_hex(4)
        self._log.error("incident", error, incident=incident)
        message = f"{self._model} failed with {type(error).__name__}; the server's log has the details under {incident}"
        return pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL)

    def _refusal(self, outcome: str, error: Exception, code: int, told: str = "") -> pb_utils.TritonError:
        """told: to the client, where that is not all of it."""
        self._outcome = outcome
        self._log.info(outcome, reason=str(error))
        return pb_utils.TritonError(told or str(error), code)

    def end(self) -> Mapping[WorkAmount, float]:
        """Publishes the outcome; seconds of the work that is done if the request was answered."""
        seconds = self._clock.finish()
        self._metrics.add(table.RUNNING, -1)
        self._metrics.add(table.REQUESTS, 1, outcome=self._outcome)
        if self._outcome != "done":
            return {}
        self._metrics.observe(table.REQUEST_SECONDS, seconds)
        stages = {stage: round(spent, 3) for stage, spent in self._clock.seconds.items()}
        for stage, spent in stages.items():
            self._metrics.observe(table.STAGE_SECONDS, spent, stage=stage)
        if self._media_seconds:
            self._metrics.observe(table.FACTOR, seconds / self._media_seconds)
        self._log.info("done", seconds=round(seconds, 3), stages=stages)
        done = {work: self._clock.seconds[stage] for stage, work in self._works.items() if stage in self._clock.seconds}
        return {**done, request_in(self._model): seconds} if done else {}


def _end_with(server: int) -> None:
    """Ends this process, and so its ranks, when tritonserver is gone: a stub whose server was killed waits for ever."""
    while os.getppid() == server:
        time.sleep(SERVER_SECONDS)
    os._exit(1)


def request_in(model: str) -> WorkAmount:
    """A request in a model, whatever its size."""
    return WorkAmount(f"request in {model}", 1.0)


class Model(ABC):
    """Triton's life cycle around one piece of the pipeline; a subclass opens what it needs and executes requests."""

    cache: ConditionCache | CacheThere | None = None
    """Of what the model encodes, if it does."""
    forecaster: Forecaster
    """Of a model that measures."""
    _recorder: Recorder | None = None
    _ranked: RankedPipeline | None = None
    """Of a model whose engines run in ranks."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the model. Triton refuses to load it when this raises, with the exception's text (a StoreError, say)."""
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        self.name = args["model_name"]
        parameters = json.loads(args["model_config"])["parameters"]
        self.settings = Settings.of({name: value["string_value"] for name, value in parameters.items()})
        set_up()
        self.log = Log(self.name)
        self.metrics = Metrics(self.name)
        # Triton's own metrics count what waits for a model but not what runs in it; draining needs both.
        self.metrics.show(table.RUNNING, 0)
        started = time.monotonic()
        self.open(self.settings.store)
        self.log.info("opened", seconds=round(time.monotonic() - started, 3))

    @abstractmethod
    def open(self, store: Path) -> None:
        """Open what the model needs of the engine store at `store`."""

    def finalize(self) -> None:
        """Ends the ranks."""
        if self._ranked is not None:
            self._ranked.close()

    def open_pipeline(self, store: Path, stages: Collection[PipelineStage]) -> AnyPipeline:
        """The pipeline of some stages, in this process or in the server's ranks, every engine opened.

        Its work is measured.
        """
        from runtime.ranked_pipeline import RankedPipeline, open_pipeline

        chosen = self.settings
        start = partial(start_shared, folder_of(os.getppid(), chosen.state.folder if chosen.state else None))
        pipeline = open_pipeline(
            store, stages, chosen.condition_cache, chosen.media, chosen.stall, start, on_gpu_in_ranks=True
        )
        if isinstance(pipeline, RankedPipeline):
            self._ranked = pipeline
        self._show_ranks(pipeline)
        self.measure(pipeline.manifest)
        pipeline.warm()
        return pipeline

    def measure(self, manifest: Manifest) -> None:
        """From now on, remember what the work of requests takes with these engines, and estimate others by it."""
        state = self.settings.state
        self.forecaster = Forecaster(manifest, state.timings if state is not None else None)
        if state is not None:
            self._recorder = Recorder(state.timings / f"{self.name}.json", identity(manifest))

    def warm(self, rehearsals: Iterable[Rehearsal], run: Callable[[Rehearsal, Progress], Taken]) -> None:
        """Before the model is ready, run requests of each size that it is for, if the operator wants it.

        One that fails keeps the model from loading. The last one's times are remembered: the first of its size chose
        kernels. One process after the other: they share the device, and Triton does not let them take turns yet.
        """
        if not self.settings.warm:
            return
        done: Mapping[WorkAmount, float] = {}
        with self.settings.state.device() if self.settings.state is not None else nullcontext():
            for rehearsal in rehearsals:
                done = self._warmed(rehearsal, run) or done
        if done and self._recorder is not None:
            self._remember(done, self._recorder)

    def _warmed(self, rehearsal: Rehearsal, run: Callable[[Rehearsal, Progress], Taken]) -> Mapping[WorkAmount, float]:
        """Seconds of the work that one of them was; nothing for one that this machine does not admit."""
        clock = StageClock(time.monotonic)

        def progress(event: Event) -> None:
            clock(event)

        try:
            taken = run(rehearsal, progress)
        except RequestError as refusal:
            self.log.warning("not warmed", params=dict(rehearsal.params), reason=str(refusal))
            return {}
        self.log.info("warmed", params=dict(rehearsal.params), seconds=round(clock.finish(), 3))
        return {work: clock.seconds[stage] for stage, work in self.works(taken).items() if stage in clock.seconds}

    def works(self, taken: Taken) -> Mapping[WorkStage, WorkAmount]:
        """How much work a request is."""
        return work_of(taken.resolved, len(taken.presented.token_ids), self.forecaster.dimensions)

    @contextmanager
    def working(self, request: pb_utils.InferenceRequest) -> Iterator[Work]:
        """One request that the model works on; the block must not raise, `Work.error` takes what it would."""
        work = Work(self.name, request.request_id(), self.metrics, self.log)
        reused = self.cache.counts.hits if self.cache is not None else 0
        try:
            yield work
        finally:
            done = dict(work.end())
            if self._ranked is not None:
                self._show_ranks(self._ranked)
            if self.cache is not None:
                self._show_cache(self.cache)
                if self.cache.counts.hits != reused:
                    # What was not encoded says nothing of what encoding takes.
                    done = {one: seconds for one, seconds in done.items() if not one.kind.startswith("encode")}
            if done and self._recorder is not None:
                self._remember(done, self._recorder)
            allocation.give_back()

    def _remember(self, done: Mapping[WorkAmount, float], recorder: Recorder) -> None:
        try:
            recorder.add(done)
        except OSError as error:
            # A full disk costs estimates, not the request that has just been answered.
            self.log.warning("timings were not kept", reason=str(error))

    def queue(self) -> Queue | None:
        """What the server has to do before a request that comes now; None where its metrics cannot be read."""
        try:
            text = read_metrics(os.environ[METRICS_VARIABLE])
        except (KeyError, *UNREACHABLE):
            return None
        kinds = {request_in(model).kind: model for model in DEVICE_MODELS}
        return queue_of(text, {kinds[kind]: seconds for kind, seconds in self.forecaster.means(kinds).items()})

    def admitted(self, taken: Taken, arrival: int | None, queue: Queue | None) -> Resolved:
        """A request with its estimate. Raises RequestError and Late for one that cannot meet its deadline."""
        rows = len(taken.presented.token_ids)
        estimate = self.forecaster.estimate(taken.resolved, rows, taken.memory_bytes, queue, arrival)
        self.forecaster.check(taken.resolved, estimate)
        return taken.resolved.model_copy(update={"estimate": estimate})

    def check_deadline(self, resolved: Resolved, stages: Collection[WorkStage]) -> None:
        """Refuses a request that has waited too long for its deadline, with `stages` to come. Raises Late."""
        if resolved.estimate is not None:
            self.forecaster.check(resolved, resolved.estimate.model_copy(update={"queue": None}), stages)

    def _show_ranks(self, pipeline: AnyPipeline) -> None:
        self.metrics.show(table.RANK_RESTARTS, pipeline.restarts)
        for rank, weights in enumerate(pipeline.weights):
            self.metrics.show(table.RANK_WEIGHTS, weights, rank=str(rank))

    def _show_cache(self, cache: ConditionCache | CacheThere) -> None:
        """Publishes the counts of a cache of conditions."""
        counts = cache.counts
        for count, metric in table.CACHE.items():
            self.metrics.show(metric, getattr(counts, count))


class UnaryModel(Model):
    """A model that gives one answer to a request."""

    @abstractmethod
    def run(self, request: pb_utils.InferenceRequest, work: Work) -> list[pb_utils.Tensor]:
        """The output tensors of one request."""

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """One answer for each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        with self.working(request) as work:
            try:
                return pb_utils.InferenceResponse(self.run(request, work))
            except Exception as error:
                return pb_utils.InferenceResponse(error=work.error(error))


def read_request(request: pb_utils.InferenceRequest) -> tuple[bytes, dict[str, Any], dict[Kind, list[bytes]]]:
    """PROMPT as it came, PARAMS as an object and the files by kind, for `take`. Raises RequestError."""
    prompt, params = (read_bytes(request, name) for name in ("PROMPT", "PARAMS"))
    files = {kind: read_elements(request, name) for kind, name in INPUTS.items()}
    return prompt, parse_params(params), files


def read_arrival(request: pb_utils.InferenceRequest) -> int | None:
    """When the request came to the server, by the estimate that its client was given; None: it does not say.

    The request's parameter `arrival`, microseconds of the server's own clock. Raises RequestError.
    """
    arrival = json.loads(request.parameters()).get(ARRIVAL)
    if arrival is None or (type(arrival) is int and arrival >= 0):
        return arrival
    raise RequestError(ARRIVAL, arrival, "must be the integer that the estimate of the request has")


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
