"""The file of kernel times: builds at once lose nothing, and a file that does not fit is moved aside.

TensorRT-RTX's caches are empty always, and without a driver it takes none that it has written. The merging is tried
with a cache of the same methods whose entries are lines; the refusal with TensorRT-RTX's own.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from engines.backends.tensorrt.messages import Messages
from engines.backends.tensorrt.timing_cache import TimingCache
from engines.tensorrt import load, make_logger


class Lines:
    """ITimingCache's methods over a set of lines."""

    def __init__(self, data: bytes) -> None:
        self.lines = set(data.split(b"\n")) - {b""}

    def combine(self, other: Lines, ignore_mismatch: bool) -> bool:
        self.lines |= other.lines
        return True

    def serialize(self) -> bytes:
        return b"\n".join(sorted(self.lines))


class Config:
    """IBuilderConfig's methods for caches; `times` are what the build measures. It takes no file that says "old"."""

    def __init__(self, times: bytes) -> None:
        self._times = times

    def create_timing_cache(self, data: bytes) -> Lines:
        return Lines(data)

    def set_timing_cache(self, cache: Lines, ignore_mismatch: bool) -> bool:
        cache.lines |= Lines(self._times).lines
        return True


def quiet() -> Messages:
    return Messages(lambda severity, text: None)


def test_what_another_build_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "timing.cache"
    first = TimingCache(Config(b"one"), file, quiet())
    second = TimingCache(Config(b"two"), file, quiet())
    first.save()
    second.save()
    assert file.read_bytes() == b"one\ntwo"
    TimingCache(Config(b"three"), file, quiet()).save()
    assert file.read_bytes() == b"one\nthree\ntwo"


def test_many_builds_at_once_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "timing.cache"
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.tensorrt.test_timing_cache import Config, TimingCache, quiet\n"
        "for turn in range(20):\n"
        "    TimingCache(Config(f'{sys.argv[1]}.{turn}'.encode()), Path(sys.argv[2]), quiet()).save()\n"
    )
    root = Path(__file__).parents[2]
    running = [subprocess.Popen([sys.executable, "-c", program, str(i), str(file)], cwd=root) for i in range(3)]
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    assert set(file.read_text().split("\n")) == {f"{i}.{turn}" for i in range(3) for turn in range(20)}


def test_a_file_that_tensorrt_cannot_use_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """TensorRT hands out an empty cache then, and says so in its log alone."""
    file = tmp_path / "timing.cache"
    file.write_bytes(b"of another version")
    flavour = load("tensorrt_rtx")
    messages = quiet()
    config = flavour.module.Builder(make_logger(flavour, messages)).create_builder_config()
    with caplog.at_level(logging.WARNING), pytest.warns(DeprecationWarning, match="no-ops in TensorRT-RTX"):
        cache = TimingCache(config, file, messages)
    assert f"timing cache {file}: not of this TensorRT and GPU; moved to {file}.unusable" in caplog.text
    assert Path(f"{file}.unusable").read_bytes() == b"of another version"
    assert not file.exists()
    with pytest.warns(DeprecationWarning, match="no-ops in TensorRT-RTX"):
        cache.save()
    assert file.exists()
