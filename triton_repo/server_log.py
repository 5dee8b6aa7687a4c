"""Reads the log of a tritonserver: line by line as it grows, and for the reason of a failure."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

LINES_SHOWN = 12

LOG_BYTES = 64 << 20
"""What a log may have before it begins anew; one such before it is kept."""

_ERROR = re.compile(r'^\S+ E \d+ \S+\] "?(?P<text>.*?)"?$')
_LINE = re.compile(r'^(?P<time>\S+) (?P<level>[A-Z]) \d+ \S+\] "?(?P<text>.*?)"?$')
# What every start on a machine without GPUs says, and the echo of a failure that is told before it.
_HARMLESS = re.compile("CudaDriverHelper|NVML|DCGM|pinned memory|Unable to create stream|failed to stop server", re.I)
_MODEL_FAILURE = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: \w+: (?:\w+: )?(?P<text>.*)")
# How Triton's Python backend appends where an exception came from, which is for the log and not for its reader.
_TRACE = r"\n\nAt:"
_LOADED = re.compile(r"successfully loaded '(?P<model>[^']+)'")


class FollowedLog:
    """A growing file, read in whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new_lines(self) -> list[str]:
        """The lines that were added since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()

    def bound(self, size: int = LOG_BYTES) -> None:
        """Begins the file anew once more than `size` bytes of it were read; what it held is kept beside it.

        Whoever writes it has to append.
        """
        if self._position > size:
            # On a full disk the old lines are lost, and the disk is less full.
            with suppress(OSError):
                shutil.copyfile(self._path, _previous(self._path))
            os.truncate(self._path, 0)
            self._position = 0


def keep_previous(path: Path) -> None:
    """Rename the log of the server before, of which one is kept: it says why that one was lost."""
    with suppress(FileNotFoundError):
        path.replace(_previous(path))


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def loaded_model(line: str) -> str | None:
    """The model that a line reports as loaded, if it does."""
    match = _LOADED.search(line)
    return match["model"] if match else None


def as_json(line: str) -> str:
    """A line as a JSON object: what the models wrote is one already, Triton's own become one of the same fields."""
    if line.startswith("{"):
        return line
    own = _LINE.match(line)
    if own is None:
        return json.dumps({"level": "info", "source": "tritonserver", "event": line}, ensure_ascii=False)
    level = {"E": "error", "W": "warning", "I": "info"}.get(own["level"], "debug")
    return json.dumps(
        {"time": own["time"], "level": level, "source": "tritonserver", "event": own["text"]}, ensure_ascii=False
    )


def failure(log: str) -> str:
    """Why a server failed: what its models said, else its error lines, else the end of its log."""
    errors = [match["text"] for line in log.splitlines() if (match := _ERROR.match(line))]
    told: dict[str, list[str]] = {}
    for found in filter(None, map(_MODEL_FAILURE.search, errors)):
        told.setdefault(found["text"].partition(_TRACE)[0], []).append(found["model"])
    if told:
        return "\n".join(f"{', '.join(dict.fromkeys(models))}: {text}" for text, models in told.items())
    others = [text for text in errors if not _HARMLESS.search(text)]
    return "\n".join(others or [line for line in log.splitlines() if line.strip()][-LINES_SHOWN:])
