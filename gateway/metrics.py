"""The gateway's own metrics; those of the models are Triton's to tell."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.job import VideoJob

_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


class GatewayMetrics:
    """Counts of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "http_requests", "Answers, by route, method and status", "route", "method", "status"
        )
        self.accepted = self._counter("jobs_accepted", "Jobs that were accepted")
        self.refused = self._counter("jobs_refused", "Requests for jobs that were refused, by code", "code")
        self.ended = self._counter("jobs_ended", "Jobs that ended, by status and error code", "status", "code")
        self.removed = self._counter("jobs_removed", "Ended jobs that were removed, by cause", "cause")
        self.waiting = self._gauge("jobs_waiting", "Jobs that wait in the gateway")
        self.running = self._gauge("jobs_running", "Jobs that are with the server")
        self.draining = self._gauge("draining", "1 while new jobs are refused because the gateway stops")
        self.seconds = self._histogram("job_seconds", "From a job's acceptance to its end, by status", "status")
        self.inference = self._histogram("inference_seconds", "From the model's first word to its last")
        self.queued = self._histogram("queue_seconds", "From a job's acceptance to the model's first word")
        self.bytes = self._counter("clip_bytes", "Bytes of finished clips")

    def job_ended(self, job: VideoJob, seconds: float) -> None:
        """Counts a job that ended after so many seconds."""
        self.ended.labels(job.status, "" if job.error is None else job.error.code).inc()
        self.seconds.labels(job.status).observe(seconds)
        if job.inference_time_s is not None and job.status == "completed":
            self.inference.observe(job.inference_time_s)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"h3_gateway_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"h3_gateway_{name}", text, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"h3_gateway_{name}", text, labels, registry=self._registry, buckets=_SECONDS)
