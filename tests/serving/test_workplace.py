"""A folder serves one server at a time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from h3trt.exits import Exit
from tests.conftest import H3TRT
from triton_repo.errors import ServerError
from triton_repo.workplace import held

HOLD = "import sys, time; from pathlib import Path; from triton_repo.workplace import held\n"
HOLD += "with held(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_a_folder_in_use_is_refused_by_name_and_free_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "triton" / "cpu"
    with held(folder), pytest.raises(ServerError, match=f"{folder} is in use by another server.*stop that one first"):
        held(folder).__enter__()
    with held(folder):
        pass


def test_a_killed_holder_leaves_the_folder_free(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ServerError):
        held(tmp_path).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with held(tmp_path):
        pass


def test_a_second_serve_of_a_profile_is_refused(tmp_path: Path) -> None:
    with held(tmp_path / "build" / "triton" / "cpu"):
        second = subprocess.run([*H3TRT, "serve"], cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == Exit.SERVER
    assert second.stderr.startswith("error: build/triton/cpu is in use by another server of this profile; ")
