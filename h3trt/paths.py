"""Where commands put what they are given no place for: `build/` for what can be made again, `out/` for clips."""

from __future__ import annotations

import os
from pathlib import Path

from h3trt.exits import CommandError

CHECKPOINT = Path("build/checkpoint")
OUTPUT = Path("out")
GATEWAY = OUTPUT / "gateway"
PERF = Path("build/perf")


def engine_store(profile: str) -> Path:
    """The engine store of a profile, given by name or as a file."""
    return Path("build/engines") / Path(profile).stem


def triton(profile: str) -> Path:
    """The folder of a profile's model repository and server log."""
    return Path("build/triton") / Path(profile).stem


def check_writable(file: Path) -> None:
    """Sees that a file can be written here, folders and all, before the work that makes it. Raises CommandError."""
    if file.is_dir():
        raise CommandError(f"{file}: is a directory; name a file in it")
    if file.exists() and not file.is_file():
        raise CommandError(f"{file}: is not an ordinary file; name another")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise CommandError(f"{file}: cannot be written, {folder} is not a directory; name another file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CommandError(f"{file}: cannot be written, {folder} is not writable; name another file")
