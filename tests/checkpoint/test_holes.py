"""A weight file that was made for its dimensions is told from one whose weights are zero."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from export.checkpoint.holes import lacks_data
from export.miniature import write_sparse_released

MIB = 1 << 20
HEADER = (100).to_bytes(8, "little") + b" " * 100


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A header, and a hole."""
    path = tmp_path / "f.safetensors"
    path.write_bytes(HEADER)
    os.truncate(path, 4 * MIB)
    return path


def test_a_header_and_a_hole_lack_data(file: Path) -> None:
    assert lacks_data(file)


def test_zeros_are_data(file: Path) -> None:
    file.write_bytes(HEADER + bytes(4 * MIB))
    assert not lacks_data(file)


def test_data_at_the_very_end_is_seen(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")
    assert not lacks_data(file)


def test_a_small_file_is_taken_to_have_data(file: Path) -> None:
    os.truncate(file, 1000)
    assert not lacks_data(file)


def test_every_file_of_the_sparse_release_lacks_data(tmp_path: Path) -> None:
    write_sparse_released(tmp_path / "checkpoint", "native")
    files = list((tmp_path / "checkpoint").rglob("*.safetensors"))
    assert files
    assert all(map(lacks_data, files))
