"""docs/metrics.md, written from the tables of metrics: `python -m h3trt.metrics_page docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import GatewayMetrics
from runtime.contract_page import markdown_table
from triton_repo.metric_table import METRICS, Metric

_INTRODUCTION = """# Metrics, logs and traces

Triton publishes Prometheus text at `http://127.0.0.1:8002/metrics` (`h3trt serve --metrics-port`, `--metrics-host`):
its own metrics, whose names begin with `nv_`, and those of the models, whose names begin with `h3_`. The gateway
publishes its own at `/metrics`. `deploy/grafana/h3.json` is a dashboard of all of them. This page is written from the
tables that the models and the gateway publish from; a test fails when they differ.

## Models

Every one has the label `model`. `h3_stream` goes through all stages itself; `h3_encode`, `h3_denoise` and `h3_decode`
are the steps of the ensemble `h3`. A metric appears when it is first counted, and begins anew when the server does.
"""

_TRITON = """## Triton

These are worth watching:

| metric | what it says |
|---|---|
| `nv_inference_pending_request_count` | requests that wait for a model |
| `nv_inference_queue_duration_us` | microseconds that requests have waited, all together |
| `nv_inference_request_failure` | requests that failed, by reason; `REJECTED`: a full queue, or too long a wait |
| `nv_inference_request_duration_us` | microseconds from a request's arrival to its end, all together |

## Gateway
"""

_REST = """## Logs

The models write JSON objects, one a line, into the server's log (`build/triton/PROFILE/server.log`; the one before is
kept as `server.log.1`), among Triton's own lines. `h3trt serve --log-json` writes the whole log to standard output,
each line a JSON object. The gateway writes such lines to standard error.

| field | what it says |
|---|---|
| `time` | when, in UTC |
| `level` | info, warning, error |
| `source` | the model; `tritonserver` for Triton itself |
| `event` | `opened`, `warmed`, `done`, `refused`, `late`, `cancelled`, `lost`, `incident`, `ranks`; Triton's own |
| `request` | the id that the client gave its request, the same in all models; the gateway gives the job's |
| `seconds`, `stages` | of a request that is done: in the model, and by stage |
| `reason` | why a request was refused, was late, was cancelled or was lost; what has happened to ranks |
| `incident`, `traceback` | of a fault: the id that the client was told, and where it happened |

To find everything about a request or an incident:

<!-- needs: the log of a server, and an id -->

    grep '"request": "ID"' build/triton/cpu/server.log
    grep '"incident": "ID"' build/triton/cpu/server.log

## Traces

`h3trt serve --trace http://COLLECTOR:4318/v1/traces` sends Triton's own spans to an OpenTelemetry collector, as OTLP
over HTTP: one of each request, one of each model that it goes through, and in that one its wait and its work.
"""


def page() -> str:
    """The text of docs/metrics.md."""
    head = ("metric", "kind", "labels", "what it says")
    parts = [
        _INTRODUCTION,
        markdown_table(head, map(_row, METRICS)),
        "Histograms have these upper ends of buckets:\n",
        markdown_table(("metric", "buckets"), (_bucket_row(one) for one in METRICS if one.buckets)),
        _TRITON,
        markdown_table(("metric", "kind", "what it says"), _gateway_rows()),
        _REST,
    ]
    return "\n".join(parts)


def _row(metric: Metric) -> tuple[str, ...]:
    return f"`{metric.name}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels), metric.meaning


def _bucket_row(metric: Metric) -> tuple[str, ...]:
    return f"`{metric.name}`", ", ".join(f"{end:g}" for end in metric.buckets)


def _gateway_rows() -> Iterable[tuple[str, ...]]:
    for family in text_string_to_metric_families(GatewayMetrics().text().decode()):
        if not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield f"`{name}`", family.type, family.documentation


def main() -> None:
    """Writes the page to the path given as the first argument."""
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
