"""Every family of few-step artifacts through Triton: made from what is released, served, and asked for clips."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.build import build
from engines.store import EngineStore
from export.artifacts.artifact import Artifact
from export.artifacts.fuse import fuse
from export.artifacts.read import open_artifact
from export.checkpoint import Checkpoint
from export.checkpoint.components.denoiser import DenoiserConfig
from export.miniature.artifacts import FOLDERS, write_artifacts
from runtime.events import Cancellation, ignore
from runtime.pipeline import Pipeline
from tests.serving.test_requests import PROMPT
from triton_repo.client import Client, ClientError, Failure
from triton_repo.health import check
from triton_repo.names import PUBLIC_MODELS
from triton_repo.repository import RepositorySettings, render
from triton_repo.server import ServerSettings, TritonServer

SMALLEST: dict[str, Any] = {"duration": 4, "aspect_ratio": "1:1", "width": 256, "height": 256, "seed": 7}

SWITCHED = ("turbo_4step", "flashgen")


@pytest.fixture(scope="module")
def released(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifacts, beside the demonstration's checkpoint."""
    base, folder = _base(store), tmp_path_factory.mktemp("released")
    write_artifacts(folder, DenoiserConfig.model_validate(base.config("denoiser")), seed=5)
    return folder


def _base(store: Path) -> Checkpoint:
    return Checkpoint.open(EngineStore.open(store).manifest.checkpoint.root)


@contextmanager
def _serving(engines: Path, directory: Path) -> Iterator[Client]:
    render(engines, directory / "repository", RepositorySettings(state=directory / "state"))
    settings = ServerSettings(directory / "repository", directory / "server.log", PUBLIC_MODELS)
    with TritonServer(settings) as server, Client(server.endpoints.grpc) as client:
        yield client


def _in_this_process(engines: Path, params: dict[str, Any]) -> bytes:
    """What no server had a part in; tests/pipeline compares that with diffusers."""
    pipeline = Pipeline.open(engines)
    (clip,) = pipeline.generate(pipeline.take(PROMPT, params), ignore, Cancellation())
    return clip


@pytest.mark.parametrize(
    ("family", "forwards"),
    [
        pytest.param("fasth3_v1_dense", 4, marks=pytest.mark.soak),
        ("fasth3_v1_vsa", 4),
        pytest.param("fasth3_v2", 8, marks=pytest.mark.soak),
    ],
)
def test_a_student_serves_its_schedule_and_no_other(
    store: Path, released: Path, tmp_path: Path, family: str, forwards: int
) -> None:
    base = _base(store)
    student = fuse(open_artifact(released / FOLDERS[family], base), base, tmp_path / "student")
    shutil.copytree(store, tmp_path / "engines")
    build(student.root, "cpu", tmp_path / "engines")
    with _serving(tmp_path / "engines", tmp_path) as client:
        clip = client.generate(PROMPT, SMALLEST)
        assert client.generate_unary(PROMPT, SMALLEST).mp4 == clip.mp4
        assert clip.resolved["forwards"] == forwards
        for field, value in {"num_inference_steps": forwards + 1, "flow_shift": 7, "lora": {"name": "a"}}.items():
            with pytest.raises(ClientError, match=field) as caught:
                client.generate(PROMPT, {**SMALLEST, field: value})
            assert caught.value.failure is Failure.INVALID
        # A probe asks for one forward first, which is refused.
        assert check(client.url, 300, generate=True).startswith("a clip of ")
    assert clip.mp4 == _in_this_process(tmp_path / "engines", SMALLEST)


def test_adapters_take_turns_and_leave_nothing_behind(store: Path, released: Path, tmp_path: Path) -> None:
    base = _base(store)
    opened = [open_artifact(released / FOLDERS[name], base) for name in SWITCHED]
    adapters = [one for one in opened if isinstance(one, Artifact)]
    shutil.copytree(store, tmp_path / "engines")
    build(base.root, "cpu", tmp_path / "engines", adapters=adapters)
    of_none = {**SMALLEST, "num_inference_steps": 2}
    turbo, flashgen = ({**SMALLEST, "lora": {"name": one.distilled.name}} for one in adapters)
    with _serving(tmp_path / "engines", tmp_path) as client:
        clips = [client.generate(PROMPT, each).mp4 for each in (of_none, turbo, flashgen, turbo, of_none)]
        assert clips[0] == clips[4]
        assert clips[1] == clips[3]
        assert len(set(clips)) == 3
        with pytest.raises(ClientError, match=rf"lora: .*{adapters[0].distilled.name}") as caught:
            client.generate(PROMPT, {**SMALLEST, "lora": {"name": "another"}})
        assert caught.value.failure is Failure.INVALID
    assert clips[2] == _in_this_process(tmp_path / "engines", flashgen)
