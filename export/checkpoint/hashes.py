"""SHA256SUMS: the list of file hashes that may lie in a checkpoint's root, in the format of the sha256sum tool."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from export.checkpoint.errors import CheckpointError

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def file_hash(file: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_sums(root: Path, files: Iterable[Path]) -> None:
    """Writes the list for `files` (below `root`), in path order."""
    write_listed(root, {file: file_hash(file) for file in files})


def write_listed(root: Path, sums: Mapping[Path, str]) -> None:
    """Writes the list of files (below `root`) whose hashes are known, in path order."""
    lines = (f"{sums[file]}  {file.relative_to(root).as_posix()}\n" for file in sorted(sums))
    (root / SUMS).write_text("".join(lines), encoding="utf-8")


def read_sums(root: Path) -> dict[Path, str]:
    """Each listed file and its hash, in list order; empty where the root has no list.

    Raises:
        CheckpointError: a line is malformed or leaves the root.
    """
    sums, listed = root / SUMS, {}
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else []
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if not match or Path(match[2]).is_absolute() or ".." in Path(match[2]).parts:
            raise CheckpointError(sums, f"line {number}", "<sha256>  <path below the root>", repr(line)[:120])
        listed[root / match[2]] = match[1]
    return listed


def verify_sums(root: Path, progress: Callable[[Path], None]) -> tuple[Path, ...]:
    """Checks every listed file, calling `progress` before each is read; returns them in list order.

    Raises:
        CheckpointError: there is no list, a line is malformed or leaves the root, or a file is missing or differs.
    """
    listed = read_sums(root)
    if not listed:
        raise CheckpointError(root / SUMS, "file", "a list of hashes, as `sha256sum` writes it", "no such file")
    for file, expected in listed.items():
        progress(file)
        found = file_hash(file) if file.is_file() else "no such file"
        if found != expected:
            raise CheckpointError(file, "sha256", expected, found)
    return tuple(listed)
