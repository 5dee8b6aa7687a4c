"""A checkpoint made for its dimensions is told from one whose weights are zero."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from export.checkpoint.expressions import Stored
from export.checkpoint.holes import is_hole

PLACE = 1 << 20


def stored(file: Path, offset: int = PLACE, nbytes: int = PLACE) -> Stored:
    return Stored((nbytes,), torch.uint8, "weight", file, offset, nbytes)


def test_a_hole_is_one_wherever_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"header")
    os.truncate(file, 4 * PLACE)
    assert is_hole(stored(file))
    assert is_hole(stored(file, 3 * PLACE)), "up to the end of the file"
    assert not is_hole(stored(file, 0)), "it begins with data"


def test_zeros_are_data(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(4 * PLACE))
    assert not is_hole(stored(file))


def test_data_within_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.touch()
    os.truncate(file, 4 * PLACE)
    with file.open("r+b") as opened:
        opened.seek(2 * PLACE - 5)
        opened.write(b"x")
    assert not is_hole(stored(file))
    assert is_hole(stored(file, 2 * PLACE + 4096, PLACE // 2))
