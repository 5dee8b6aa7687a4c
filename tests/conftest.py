"""The miniature's engines, built once for the whole test session by the demonstration that the README begins with.

Tests may run in several processes (pytest-xdist): each file in one of them, and all that start servers in the same one.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from xdist.scheduler import LoadScopeScheduling

H3TRT = (sys.executable, "-c", "from h3trt.cli import main; main()")

TESTS = Path(__file__).parent
SERVERS = ("serving", "gateway", "faults")
"""Folders of tests that share running servers, and that measure how long these take to answer."""
LONG = ("tensorrt", "reference", "engines")
"""Folders with files that take minutes, which should not be the last that one process is left with."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first: a process that is free takes the next file."""
    order = (*SERVERS, *LONG)
    items.sort(key=lambda item: order.index(_folder(item.nodeid)) if _folder(item.nodeid) in order else len(order))


class ByFile(LoadScopeScheduling):
    """Each file goes to one process, and the files that share servers to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return "servers" if _folder(nodeid) in SERVERS else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Whatever --dist says. xdist's groups by mark do nothing under pytest 9.2, which names tests otherwise."""
    return ByFile(config, log)


def _folder(nodeid: str) -> str:
    """The folder below tests/ that a test lies in."""
    return nodeid.removeprefix(f"{TESTS.name}/").partition("/")[0]


FIGURES = "figures"
FIGURES_KEY = pytest.StashKey[list[str]]()


def report_figure(config: pytest.Config, line: str) -> None:
    """Has a line printed below the tests' results."""
    # One process of several hands it to the one that prints.
    getattr(config, "workeroutput", {}).setdefault(FIGURES, []).append(line)
    config.stash.setdefault(FIGURES_KEY, []).append(line)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the lines of a process that ends."""
    found = getattr(node, "workeroutput", {}).get(FIGURES, [])
    node.config.stash.setdefault(FIGURES_KEY, []).extend(found)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints them."""
    for line in config.stash.get(FIGURES_KEY, []):
        terminalreporter.write_line(line)


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
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all processes of a test session share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def demonstration(installed: None, session_folder: Path) -> Demonstration:
    """The whole way from a checkpoint to a clip, as `make demo` goes it; whoever needs it first makes it."""
    directory = session_folder / "demonstration"
    work, clip, output = directory / "work", directory / "out" / "demo.mp4", directory / "output"
    with FileLock(session_folder / "demonstration.lock"):
        if not output.exists():
            directory.mkdir(exist_ok=True)
            command = [*H3TRT, "demo", "--work", str(work), "--out", str(clip)]
            result = subprocess.run(command, cwd=directory, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            output.write_text(result.stdout)
    return Demonstration(clip, work / "engines", output.read_text())


@pytest.fixture(scope="session")
def store(demonstration: Demonstration) -> Path:
    """The demonstration's engine store; tests must not change it."""
    return demonstration.store
