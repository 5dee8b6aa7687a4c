"""The one exception of the checkpoint layer."""

from __future__ import annotations

from pathlib import Path

LONGEST_KEY, LONGEST_VALUE = 200, 1000
"""Characters of a key, and of what was expected or found, that a message shows."""


class CheckpointError(Exception):
    """A checkpoint file is not what it must be. The message names the file, the key, what was expected and what found.

    Attributes: `file` (path), `key` (tensor or configuration key, or the part of the file), `expected`, `found`.
    """

    def __init__(self, file: Path | str, key: str, expected: object, found: object) -> None:
        self.file = Path(file)
        self.key = key
        self.expected = str(expected)
        self.found = str(found)
        file, wanted, got = (_shown(text, LONGEST_VALUE) for text in (str(file), self.expected, self.found))
        super().__init__(f"{file}: {_shown(key, LONGEST_KEY)}: expected {wanted}, found {got}")


def _shown(text: str, longest: int) -> str:
    """A text as a person can read it: files of strangers may have megabytes of control characters for a name."""
    short = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
