"""Finished clips on disk: a folder a job, which appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from gateway.job import JOB_ID

_UNFINISHED = ".part"
_REMOVED = ".gone"


class Clips:
    """The clips under one folder. Its calls block: run them in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, job_id: str, index: int) -> Path:
        """Where an output of a finished job lies."""
        if not JOB_ID.fullmatch(job_id):
            raise ValueError(f"not the id of a job: {job_id!r}")
        return self._folder / job_id / f"{index}.mp4"

    def append(self, job_id: str, index: int, piece: bytes) -> None:
        """Adds the next bytes of an output, which is not finished with them. Raises OSError."""
        folder = self.unfinished(job_id)
        folder.mkdir(exist_ok=True)
        with (folder / f"{index}.mp4").open("ab") as file:
            file.write(piece)

    def publish(self, job_id: str) -> int:
        """Finishes all outputs of a job at once, on the disk and not only in memory; their bytes. Raises OSError."""
        folder, size = self.unfinished(job_id), 0
        for one in folder.iterdir():
            size += one.stat().st_size
            _sync(one)
        folder.rename(self._folder / job_id)
        _sync(self._folder)
        return size

    def opened(self, job_id: str, index: int) -> BinaryIO:
        """An output to read from, of a job that may end meanwhile. Raises FileNotFoundError."""
        try:
            return (self.unfinished(job_id) / f"{index}.mp4").open("rb")
        except FileNotFoundError:
            return self.path(job_id, index).open("rb")

    def remove(self, job_id: str) -> None:
        """Removes what there is of a job, finished or not. A reader that has a file open keeps it."""
        for folder in (self.unfinished(job_id), self._folder / job_id):
            gone = folder.with_suffix(_REMOVED)
            with suppress(FileNotFoundError):
                folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def keep_only(self, finished: Collection[str]) -> None:
        """Removes everything that belongs to no finished job: what an interrupted run left."""
        for folder in self._folder.iterdir():
            if folder.name not in finished:
                shutil.rmtree(folder, ignore_errors=True)

    def unfinished(self, job_id: str) -> Path:
        """The folder of a job that has not ended."""
        return self.path(job_id, 0).parent.with_suffix(_UNFINISHED)


def _sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
