"""The miniature's engines, built once for the whole test session by the demonstration that the README begins with."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

H3TRT = (sys.executable, "-c", "from h3trt.cli import main; main()")


@pytest.fixture(scope="session")
def installed() -> None:
    """Triton's Python sees only what is installed, not pytest's path."""
    try:
        importlib.metadata.version("h3trt")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("these tests need the project installed in this environment: pip install -e .", pytrace=False)


@dataclass(frozen=True)
class Demonstration:
    """What `h3trt demo` made: the clip, and the engine store of its miniature."""

    clip: Path
    store: Path
    output: str


@pytest.fixture(scope="session")
def demonstration(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Demonstration:
    """The whole way from a checkpoint to a clip, as `make demo` goes it."""
    directory = tmp_path_factory.mktemp("demo")
    work, clip = directory / "work", directory / "out" / "demo.mp4"
    command = [*H3TRT, "demo", "--work", str(work), "--out", str(clip)]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return Demonstration(clip, work / "engines", result.stdout)


@pytest.fixture(scope="session")
def store(demonstration: Demonstration) -> Path:
    """The demonstration's engine store; tests must not change it."""
    return demonstration.store
