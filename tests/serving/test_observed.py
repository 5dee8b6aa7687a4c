"""What an operator sees of a running server: every metric of the table and of the dashboard, and traces."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.metrics import GatewayMetrics
from tests.serving.conftest import Toy
from tests.serving.test_requests import PROMPT, QUICK
from triton_repo.client import Client
from triton_repo.health import check
from triton_repo.metric_table import METRICS
from triton_repo.scrape import samples, value
from triton_repo.server import TritonServer

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "h3.json"


@pytest.fixture(scope="module")
def metrics(server: TritonServer) -> str:
    """Those of the real models after a request of each kind."""
    with Client(server.endpoints.grpc) as client:
        client.generate(PROMPT, {**QUICK, "container": "fragmented"})
        client.generate_unary(PROMPT, QUICK)
    with urllib.request.urlopen(f"http://{server.endpoints.metrics}/metrics") as answer:
        return answer.read().decode()


def test_a_running_server_publishes_every_metric_of_the_table(metrics: str) -> None:
    for metric in METRICS:
        name = f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name
        found = list(samples(metrics, name))
        assert found, metric.name
        assert all({"model", *metric.labels} <= set(labels) for labels, _ in found), metric.name


def test_every_metric_that_the_dashboard_names_is_there(metrics: str) -> None:
    published = metrics + GatewayMetrics().text().decode()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    named = {name for expr in _expressions(panels) for name in re.findall(r"\b(?:h3|nv)_\w+", expr)}
    families = {name.removesuffix("_bucket") for name in named}
    assert [family for family in families if f"# TYPE {family} " not in published] == []
    assert len(families) > 15


def _expressions(panels: list[Any]) -> Iterator[str]:
    for panel in panels:
        for target in panel.get("targets", []):
            # Without the values of labels, which may be names of models.
            yield re.sub(r'"[^"]*"', "", target["expr"])


def test_the_stages_of_a_request_add_up_to_the_request(metrics: str) -> None:
    stages = value(metrics, "h3_stage_seconds_sum", model="h3_stream")
    whole = value(metrics, "h3_request_seconds_sum", model="h3_stream")
    assert stages == pytest.approx(whole, rel=0.01)
    steps = value(metrics, "h3_step_seconds_count", model="h3_stream")
    assert steps == value(metrics, "h3_units_total", model="h3_stream", stage="denoise")


def test_a_canary_is_answered_and_its_clip_made(server: TritonServer) -> None:
    assert check(server.endpoints.grpc, 60) == "a dry run was answered"
    assert "a clip of" in check(server.endpoints.grpc, 60, generate=True)


class Collector:
    """An OpenTelemetry collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in body["resourceSpans"]:
                    for scope in resource["scopeSpans"]:
                        spans.extend(scope["spans"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.usefixtures("prefixes")
def test_a_collector_gets_the_spans_of_all_models_that_a_request_goes_through(toy: Toy) -> None:
    with Collector() as collector, TritonServer(replace(toy.settings, trace=collector.url)) as server:
        with Client(server.endpoints.grpc) as client:
            client.generate_unary("p", {})
        deadline = time.monotonic() + 30
        names: set[str] = set()
        while not {"h3", "h3_prepare", "first", "second"} <= names and time.monotonic() < deadline:
            time.sleep(0.1)
            names = {span["name"] for span in collector.spans}
    assert {"h3", "h3_prepare", "first", "second", "compute"} <= names
    traces = {span["traceId"] for span in collector.spans if span["name"] in ("h3", "first", "second")}
    assert len(traces) == 1
