"""Every metric that the models publish, as one table: the models, docs/metrics.md, the dashboard's test read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper ends of the buckets of stages and requests: from a miniature's tokeniser to fifteen seconds on a CPU."""

STEP_SECONDS = (0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
"""The same of one forward of the denoiser."""

FACTORS = (0.1, 0.2, 0.5, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
"""The same of a real-time factor; 1 is real time."""

OUTCOMES = ("done", "refused", "late", "cancelled", "lost", "failed")
"""How requests end: with an answer, for what they ask, for a deadline, by their client, with a rank that was lost, by a
fault of the server."""


@dataclass(frozen=True)
class Metric:
    """One family of metrics: its name, its labels beside `model`, what it counts, and a histogram's bucket ends."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


WAITING = "nv_inference_pending_request_count"
"""Triton's own gauge of the requests that wait for a model."""

RUNNING = Metric(
    "h3_running_requests",
    "gauge",
    (),
    "Requests that the model is working on; Triton's own metrics count only those that wait",
)
REQUESTS = Metric(
    "h3_requests_total", "counter", ("outcome",), f"Requests that have ended, by outcome: {', '.join(OUTCOMES)}"
)
REQUEST_SECONDS = Metric(
    "h3_request_seconds", "histogram", (), "Seconds that an answered request took in the model, queue aside", SECONDS
)
STAGE_SECONDS = Metric(
    "h3_stage_seconds",
    "histogram",
    ("stage",),
    "Seconds that an answered request took in a stage: prepare, encode, denoise, decode",
    SECONDS,
)
STEP = Metric("h3_step_seconds", "histogram", (), "Seconds of one forward of the denoiser", STEP_SECONDS)
UNITS = Metric(
    "h3_units_total",
    "counter",
    ("stage",),
    "Units of progress: layers and tiles of encoders, forwards of the denoiser, tiles of the decoder",
)
FACTOR = Metric(
    "h3_real_time_factor",
    "histogram",
    (),
    "Seconds in the model for each second of media that it made; up to 1 is real time",
    FACTORS,
)
FIRST_FRAGMENT = Metric(
    "h3_first_fragment_seconds",
    "histogram",
    (),
    "Seconds in the model until the first fragment of a streamed MP4 left",
    SECONDS,
)
RECEIVED = Metric("h3_received_bytes_total", "counter", (), "Bytes of files that came with requests or were fetched")
SENT = Metric("h3_sent_bytes_total", "counter", (), "Bytes of finished MP4")
CACHE_HITS = Metric(
    "h3_condition_cache_hits_total", "counter", (), "Prompts and references whose encoding was still there"
)
CACHE_MISSES = Metric("h3_condition_cache_misses_total", "counter", (), "Prompts and references that were encoded")
CACHE_BYTES = Metric("h3_condition_cache_bytes", "gauge", (), "Bytes of encodings that are kept")
RESTARTS = Metric("h3_restarts_total", "counter", (), "Times that h3trt serve has started the lost server again")
RANK_RESTARTS = Metric(
    "h3_rank_restarts_total",
    "counter",
    (),
    "Times that lost ranks have been started again, as far as the model has heard: models share them",
)
RANK_WEIGHTS = Metric(
    "h3_rank_weight_bytes",
    "gauge",
    ("rank",),
    "Bytes of weights that a rank's engines read; a model without ranks is rank 0",
)

METRICS = (
    RUNNING,
    REQUESTS,
    REQUEST_SECONDS,
    STAGE_SECONDS,
    STEP,
    UNITS,
    FACTOR,
    FIRST_FRAGMENT,
    RECEIVED,
    SENT,
    CACHE_HITS,
    CACHE_MISSES,
    CACHE_BYTES,
    RESTARTS,
    RANK_RESTARTS,
    RANK_WEIGHTS,
)

CACHE = {"hits": CACHE_HITS, "misses": CACHE_MISSES, "bytes": CACHE_BYTES}
"""What is published of each count of the cache of conditions."""
