"""The program as its user meets it: demo, serve, generate, and engines that cannot be served from."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from engines.store import EngineStore, rebuild_command
from runtime.probe import inspect_mp4
from tests.conftest import H3TRT, Demonstration
from tests.serving.conftest import Traces
from tests.serving.test_requests import PROMPT
from triton_repo.errors import ServerError
from triton_repo.names import PUBLIC_MODELS
from triton_repo.repository import RepositorySettings, render
from triton_repo.server import ServerSettings, TritonServer

OPTIONS = ["--seconds", "4", "--aspect-ratio", "1:1", "--width", "256", "--height", "256", "--seed", "5"]


def _h3trt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*H3TRT, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


def test_the_demonstration_ends_with_a_checked_clip(demonstration: Demonstration) -> None:
    assert "all is as requested" in demonstration.output
    report = inspect_mp4(demonstration.clip)
    assert report.problems(256, 256, 107) == []
    assert report.audio.rms > 1e-3


def test_generate_writes_the_same_clip_with_and_without_a_server(
    demonstration: Demonstration, server: TritonServer, tmp_path: Path
) -> None:
    arguments = ["generate", *OPTIONS, "--forwards", "1"]
    remote = _h3trt(*arguments, "--url", server.endpoints.grpc, "--out", "a/remote.mp4", "--", PROMPT, cwd=tmp_path)
    local = _h3trt(
        *arguments, "--local", "--store", str(demonstration.store), "--out", "local.mp4", "--", PROMPT, cwd=tmp_path
    )
    assert (remote.returncode, local.returncode) == (0, 0), remote.stderr + local.stderr
    assert "256x256, 107 frames, 1 forwards, seed 5" in remote.stdout
    assert (tmp_path / "a/remote.mp4").read_bytes() == (tmp_path / "local.mp4").read_bytes()


def test_a_dry_run_prints_the_resolved_request(server: TritonServer, tmp_path: Path) -> None:
    result = _h3trt("generate", *OPTIONS, "--url", server.endpoints.grpc, "--dry-run", "--", PROMPT, cwd=tmp_path)
    resolved = json.loads(result.stdout)
    assert (resolved["frames"], resolved["forwards"], resolved["prompt"]) == (107, 49, PROMPT)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_request_is_one_line(server: TritonServer, tmp_path: Path) -> None:
    result = _h3trt("generate", "--seconds", "3.99", "--url", server.endpoints.grpc, "p", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "got 3.99" in result.stderr
    assert result.stderr.count("\n") == 1


class Serve:
    """`h3trt serve` on free ports in a folder of its own."""

    def __init__(self, store: Path, folder: Path) -> None:
        ports = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"]
        self.process = subprocess.Popen(
            [*H3TRT, "serve", "--store", str(store), *ports],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> str:
        """Wait for the endpoints; the gRPC one."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(3)]
        return lines[0].split()[1]

    def traces(self) -> Traces:
        """What its tritonserver has, which is waited for."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for child in psutil.Process(self.process.pid).children():
                if child.name() == "tritonserver":
                    return Traces(child.pid)
            time.sleep(0.05)
        raise AssertionError("no tritonserver was started")

    def stop(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        self.output, self.errors = self.process.communicate(timeout=120)
        return self.process.returncode


# Ctrl-C takes the same way, and starts a server for it.
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM])
def test_a_signal_drains_and_leaves_nothing(
    demonstration: Demonstration, tmp_path: Path, number: signal.Signals
) -> None:
    serve = Serve(demonstration.store, tmp_path)
    url = serve.ready()
    traces = serve.traces()
    running = subprocess.Popen(
        [*H3TRT, "generate", *OPTIONS, "--forwards", "2", "--url", url, "--out", "clip.mp4", "--", PROMPT],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    assert "encode" in running.stderr.readline()
    code = serve.stop(number)
    running.communicate(timeout=60)
    assert (code, running.returncode) == (0, 0), serve.errors
    assert inspect_mp4(tmp_path / "clip.mp4").problems(256, 256, 107) == []
    assert traces.left() == []


def test_a_signal_while_starting_leaves_nothing(demonstration: Demonstration, tmp_path: Path) -> None:
    serve = Serve(demonstration.store, tmp_path)
    traces = serve.traces()
    assert serve.stop(signal.SIGINT) == 130
    assert "Traceback" not in serve.errors
    assert traces.left() == []


@pytest.fixture
def damaged(demonstration: Demonstration, tmp_path: Path) -> Path:
    """A copy of the store whose engine of the block is missing."""
    store = tmp_path / "store"
    shutil.copytree(demonstration.store, store)
    (store / EngineStore.open(store).manifest.graphs["block"].file.path).unlink()
    return store


def _rebuild(store: Path) -> str:
    """The command that must be named; the manifest of a damaged store can still be read."""
    manifest = json.loads((store / "manifest.json").read_text())
    return rebuild_command(store, "cpu", manifest["checkpoint"]["root"])


def test_serve_refuses_a_missing_engine(damaged: Path, tmp_path: Path) -> None:
    result = _h3trt("serve", "--store", str(damaged), cwd=tmp_path)
    assert result.returncode == 4
    assert _rebuild(damaged) in result.stderr
    assert "Traceback" not in result.stderr


def test_serve_refuses_a_corrupt_engine(demonstration: Demonstration, damaged: Path, tmp_path: Path) -> None:
    name = EngineStore.open(demonstration.store).manifest.graphs["block"].file.path
    data = bytearray((demonstration.store / name).read_bytes())
    data[len(data) // 2] ^= 1
    (damaged / name).write_bytes(data)
    result = _h3trt("serve", "--store", str(damaged), cwd=tmp_path)
    assert result.returncode == 4
    assert name in result.stderr
    assert _rebuild(damaged) in result.stderr


def test_an_engine_lost_before_the_models_load_is_told_by_the_server(
    demonstration: Demonstration, tmp_path: Path
) -> None:
    """Triton itself then refuses to start: what it serves is what was verified."""
    store = tmp_path / "store"
    shutil.copytree(demonstration.store, store)
    render(store, tmp_path / "repository", RepositorySettings())
    os.unlink(store / EngineStore.open(store).manifest.graphs["block"].file.path)
    settings = ServerSettings(tmp_path / "repository", tmp_path / "log", PUBLIC_MODELS)
    with pytest.raises(ServerError, match=re.escape(_rebuild(store))):
        TritonServer(settings).__enter__()
