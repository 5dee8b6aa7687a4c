"""A large file that is there when all of it is: its size is known, and its space taken, before it is written."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class Output:
    """The file while it is written. `written` counts bytes."""

    def __init__(self, descriptor: int, explain: Callable[[OSError], Exception]) -> None:
        self._descriptor = descriptor
        self._explain = explain
        self.written = 0

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Puts the bytes at an offset."""
        view = memoryview(data)
        while view:
            try:
                count = os.pwrite(self._descriptor, view, offset)
            except OSError as error:
                raise self._explain(error) from error
            view, offset = view[count:], offset + count
            self.written += count


@contextmanager
def whole_file(path: Path, size: int, refusal: Callable[[str], Exception]) -> Iterator[Output]:
    """Writes `path`, which appears, on disk and complete, when the block ends; if it fails, nothing has changed.

    What an interrupted write has left behind is removed; one process at a time may write a file.

    Raises:
        `refusal`: the disk is full.
    """

    def explain(error: OSError) -> Exception:
        return refusal(_no_space(path, size)) if error.errno == errno.ENOSPC else error

    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        left.unlink()
    if shutil.disk_usage(path.parent).free < size:
        raise refusal(_no_space(path, size))
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        try:
            _take_space(descriptor, size, explain)
            yield Output(descriptor, explain)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def raw_bytes(value: torch.Tensor) -> memoryview:
    """A tensor's bytes as they lie in a file."""
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data


def sync_directory(directory: Path) -> None:
    """Sees to it that the names in a directory are on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_space(descriptor: int, size: int, explain: Callable[[OSError], Exception]) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise explain(error) from error


def _no_space(path: Path, size: int) -> str:
    free = shutil.disk_usage(path.parent).free
    return (
        f"{path}: {size:,} bytes needed, {free:,} free on its disk; free {max(0, size - free):,} bytes, or name a "
        "place on another disk"
    )
