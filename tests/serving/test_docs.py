"""What the README and the pages say runs does, in their own words, against the running server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import PAGES, PYTHON, RUNS, Block, blocks
from triton_repo.server import TritonServer

SHOWN = "127.0.0.1:8001"
"""Where the pages have the server."""

BLOCKS = [block for page in PAGES for block in blocks(page) if block.marker == RUNS]


@pytest.fixture
def folder(store: Path, tmp_path: Path) -> Path:
    """A folder with the engines where the pages have them, and the program on its PATH."""
    (tmp_path / "build" / "engines").mkdir(parents=True)
    (tmp_path / "build" / "engines" / "cpu").symlink_to(store)
    program = tmp_path / "bin" / "h3trt"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom h3trt.cli import main\nmain()\n")
    program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_what_a_page_shows_runs(block: Block, folder: Path, server: TritonServer) -> None:
    text = block.text.replace(SHOWN, server.endpoints.grpc)
    command = [sys.executable, "-c", text] if block.language == PYTHON else ["bash", "-euo", "pipefail", "-c", text]
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
