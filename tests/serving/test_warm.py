"""A server that is warmed has run requests before it says that it is ready."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Demonstration
from tests.serving.test_requests import PROMPT, QUICK
from triton_repo.client import Client
from triton_repo.names import DEVICE_MODELS, PUBLIC_MODELS
from triton_repo.repository import RepositorySettings, render
from triton_repo.server import ServerSettings, TritonServer


@pytest.mark.soak
@pytest.mark.usefixtures("prefixes")
def test_a_warmed_server_is_ready_when_all_models_have_run_and_estimates_its_first_request(
    demonstration: Demonstration, tmp_path: Path
) -> None:
    settings = RepositorySettings(state=tmp_path / "state", warm=True)
    render(demonstration.store, tmp_path / "repository", settings)
    log = tmp_path / "server.log"
    with TritonServer(ServerSettings(tmp_path / "repository", log, PUBLIC_MODELS)) as server:
        said = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        assert {line["source"] for line in said if line["event"] == "warmed"} == set(DEVICE_MODELS)
        with Client(server.endpoints.grpc) as client:
            assert client.resolve(PROMPT, QUICK)["estimate"]["seconds"] > 0
