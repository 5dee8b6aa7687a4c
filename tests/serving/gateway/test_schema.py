"""schemathesis, unmodified, against the gateway's own OpenAPI document and the real models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.serving.gateway.conftest import Serving

CONFIG = Path(__file__).with_name("schemathesis.toml")


def _schemathesis(http: httpx2.Client, phases: str, examples: int, *options: str) -> None:
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    url = str(http.base_url.join("/openapi.json"))
    arguments = ["--config-file", str(CONFIG), "run", url, "--phases", phases, "--max-examples", str(examples)]
    done = subprocess.run(
        [*command, *arguments, "--no-color", "--generation-database", "none", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Operations:       12 selected / 12 total" in done.stdout


def test_the_openapi_document_says_what_the_gateway_does(serving: Serving) -> None:
    """Every operation, a few examples of each; always the same ones."""
    with serving(sync_seconds=1) as http:
        _schemathesis(http, "examples,fuzzing", 4, "--seed", "1")
        assert http.get("/healthz").status_code == 200


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_openapi_document_says_what_the_gateway_does_at_length(serving: Serving) -> None:
    with serving(sync_seconds=1) as http:
        _schemathesis(http, "examples,coverage,fuzzing,stateful", 50)
        assert http.get("/healthz").status_code == 200
