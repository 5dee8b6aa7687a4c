"""Too little shared memory and full disks: what does not fit fails by name, and everything else goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import H3TRT, Demonstration
from tests.disks import file_system
from tests.faults.http import RESOLVED
from tests.serving.conftest import Toy
from triton_repo.client import Client
from triton_repo.server import TritonServer

IN_SMALL_SHARED_MEMORY = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"',
    "sh",
)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for nothing more than names."""
    with file_system(tmp_path, "64k") as mounted:
        with pytest.raises(OSError, match="No space left"):
            (mounted / "filler").write_bytes(bytes(1 << 20))
        yield mounted


def test_64_mib_of_shared_memory_serve_what_fits_and_refuse_the_rest_by_name(
    demonstration: Demonstration, tmp_path: Path
) -> None:
    program = [sys.executable, "-m", "tests.faults.small_shared_memory", str(demonstration.store), str(tmp_path)]
    if subprocess.run([*IN_SMALL_SHARED_MEMORY, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make a mount namespace")
    result = subprocess.run(
        [*IN_SMALL_SHARED_MEMORY, *program], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["before"] == found["unary"] == found["after"]
    for way in ("stream", "ensemble"):
        failure, text = found[f"too large for the {way}"]
        assert failure == "UNAVAILABLE"
        assert "shared memory" in text
        assert "--shm-size" in text
    assert found["left"] == []


def test_a_log_that_cannot_grow_stops_no_request(toy: Toy, full_disk: Path) -> None:
    settings = replace(toy.settings, log_file=full_disk / "server.log")
    with TritonServer(settings) as server, Client(server.endpoints.grpc) as client:
        assert client.generate("p", {"units": 3, "pause": 0.01}).mp4 == b"m"
        assert client.generate_unary("p", {}).mp4 == b'{"outputs": 1}'


def test_a_clip_that_cannot_be_saved_is_told_and_leaves_no_half_of_it(
    toy_server: TritonServer, full_disk: Path
) -> None:
    params = json.dumps({**RESOLVED, "size": 1_000_000})
    command = [*H3TRT, "generate", "--url", toy_server.endpoints.grpc, "--params", params]
    before = sorted(full_disk.iterdir())
    result = subprocess.run([*command, "--out", str(full_disk / "clip.mp4"), "p"], capture_output=True, text=True)
    assert result.returncode not in (0, 1), result.stderr
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(full_disk.iterdir()) == before
