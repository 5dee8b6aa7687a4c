"""The one exception of the checkpoint layer."""

from __future__ import annotations

from pathlib import Path

LONGEST_KEY = 200
"""Characters of a key that a message shows."""


class CheckpointError(Exception):
    """A checkpoint file is not what it must be. The message names the file, the key, what was expected and what found.

    Attributes: `file` (path), `key` (tensor or configuration key, or the part of the file), `expected`, `found`.
    """

    def __init__(self, file: Path | str, key: str, expected: object, found: object) -> None:
        self.file = Path(file)
        self.key = key
        self.expected = str(expected)
        self.found = str(found)
        super().__init__(f"{self.file}: {_shown(key)}: expected {expected}, found {found}")


def _shown(key: str) -> str:
    """A key as a person can read it: files of strangers may have megabytes of control characters for a name."""
    short = key if len(key) <= LONGEST_KEY else f"{key[:LONGEST_KEY]}..."
    return short if short.isprintable() else ascii(short)
