"""Finished clips on disk: a folder a job, which appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

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

    def write(self, job_id: str, index: int, mp4: bytes) -> None:
        """Puts an output where nobody sees it yet, on the disk and not only in memory. Raises OSError."""
        folder = self._unfinished(job_id)
        folder.mkdir(exist_ok=True)
        with (folder / f"{index}.mp4").open("wb") as file:
            file.write(mp4)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, job_id: str) -> int:
        """Makes all outputs of a job visible at once; their bytes together. Raises OSError."""
        folder = self._unfinished(job_id)
        size = sum(one.stat().st_size for one in folder.iterdir())
        folder.rename(self._folder / job_id)
        self._sync()
        return size

    def remove(self, job_id: str) -> None:
        """Removes what there is of a job, finished or not. A reader that has a file open keeps it."""
        for folder in (self._unfinished(job_id), self._folder / job_id):
            gone = folder.with_suffix(_REMOVED)
            with suppress(FileNotFoundError):
                folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def keep_only(self, finished: Collection[str]) -> None:
        """Removes everything that belongs to no finished job: what an interrupted run left."""
        for folder in self._folder.iterdir():
            if folder.name not in finished:
                shutil.rmtree(folder, ignore_errors=True)

    def _unfinished(self, job_id: str) -> Path:
        return self.path(job_id, 0).parent.with_suffix(_UNFINISHED)

    def _sync(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
