"""Requests of a real server that choose adapters, one after another: each is the clip that it is alone (case 7)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.profile import PROFILES
from engines.store import EngineStore
from export.checkpoint import Checkpoint
from export.checkpoint.components.denoiser import DenoiserConfig
from export.miniature.artifacts import FOLDERS, write_artifacts
from runtime.probe import inspect_mp4
from tests.conftest import H3TRT, Demonstration
from tests.request.vectors import SMALL
from triton_repo.client import Client, ClientError
from triton_repo.names import PUBLIC_MODELS
from triton_repo.repository import RepositorySettings, render
from triton_repo.server import ServerSettings, TritonServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

PROMPT = "A red fox trots through fresh snow."
PLAIN = {**SMALL, "num_inference_steps": 2, "seed": 5}
TURBO, FLASHGEN = "fl2v_turbo_4step_v1.0_768p", "t2va_flashgen_4step_v1.0_768p"


@pytest.fixture(scope="module")
def client(demonstration: Demonstration, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server of the demonstration's checkpoint and two adapters, built by the command that the pages name."""
    root = tmp_path_factory.mktemp("adapters")
    checkpoint = Path(EngineStore.open(demonstration.store).manifest.checkpoint.root)
    write_artifacts(root, DenoiserConfig.model_validate(Checkpoint.open(checkpoint).config("denoiser")), seed=3)
    (root / "cpu.toml").write_text((PROFILES / "cpu.toml").read_text().partition("[quality")[0])
    shutil.copytree(demonstration.store, root / "engines")
    files = [word for name in ("turbo_4step", "flashgen") for word in ("--adapter", str(root / FOLDERS[name]))]
    options = ["--profile", str(root / "cpu.toml"), "--store", str(root / "engines"), "--checkpoint", str(checkpoint)]
    built = subprocess.run([*H3TRT, "engines", "build", *options, *files], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    render(root / "engines", root / "repository", RepositorySettings(state=root / "state"))
    with (
        TritonServer(ServerSettings(root / "repository", root / "server.log", PUBLIC_MODELS)) as server,
        Client(server.endpoints.grpc) as one,
    ):
        yield one


def clip(client: Client, name: str | None) -> bytes:
    if name is None:
        return client.generate(PROMPT, PLAIN).mp4
    return client.generate(PROMPT, {**SMALL, "seed": 5, "lora": json.dumps({"name": name})}).mp4


def test_each_request_is_the_clip_that_it_is_alone(client: Client, server: TritonServer) -> None:
    with Client(server.endpoints.grpc) as without:
        base = without.generate(PROMPT, PLAIN).mp4
    first, second, again, none = (clip(client, name) for name in (TURBO, FLASHGEN, TURBO, None))
    assert again == first
    assert none == base
    assert len({first, second, none}) == 3
    assert inspect_mp4(second).audio.rms > 1e-3


def test_what_an_adapter_is_not_for_is_refused_and_the_next_request_is_served(client: Client) -> None:
    with pytest.raises(ClientError, match=r"num_inference_steps: got 8; .*4"):
        client.generate(PROMPT, {**SMALL, "num_inference_steps": 8, "lora": {"name": TURBO}})
    with pytest.raises(ClientError, match=rf"must be an adapter of this server.*{TURBO}"):
        client.generate(PROMPT, {**SMALL, "lora": {"name": "nobody"}})
    assert client.generate(PROMPT, PLAIN).mp4
