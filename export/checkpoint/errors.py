"""The one exception of the checkpoint layer."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint file is not what it must be. The message names the file, the key, what was expected and what found.

    Attributes: `file` (path), `key` (tensor or configuration key, or the part of the file), `expected`, `found`.
    """

    def __init__(self, file: Path | str, key: str, expected: object, found: object) -> None:
        self.file = Path(file)
        self.key = key
        self.expected = str(expected)
        self.found = str(found)
        super().__init__(f"{self.file}: {key}: expected {expected}, found {found}")
