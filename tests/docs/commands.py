"""The commands that README.md and the pages of docs/ show, and what each says about being run.

A block of commands stands below a comment: `<!-- runs -->` for those that a test runs, `<!-- needs: ... -->` with what
the others need.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

SHELL, PYTHON = "shell", "python"
RUNS = "runs"

_FENCE = re.compile(r"```(\w*)$")
_MARKER = re.compile(r"<!-- (runs|needs: .+) -->")
_INLINE = re.compile(r"`((?:h3trt|make) [^`]+)`")


@dataclass(frozen=True)
class Block:
    """A block of a page: what it is in, its text, and the marker above it, empty where there is none."""

    page: Path
    line: int
    language: str
    text: str
    marker: str

    @property
    def name(self) -> str:
        """Page and line."""
        return f"{self.page.name}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command of a shell block, comments and substitutions of a page's own left out."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def blocks(page: Path) -> Iterator[Block]:
    """Blocks of commands and of Python; fenced data of other kinds is left out."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number, marker = 0, ""
    while number < len(lines):
        start, found = number, _take(lines, number)
        if found is None:
            text = lines[number].strip()
            if text:
                match = _MARKER.fullmatch(text)
                marker = match[1] if match else ""
            number += 1
            continue
        language, text, number = found
        if language:
            yield Block(page, start + 1, language, text, marker)
        marker = ""


def inline_commands(page: Path) -> Iterator[list[str]]:
    """Words of what a page calls h3trt or make with, within its sentences."""
    for text in _INLINE.findall(page.read_text(encoding="utf-8")):
        yield shlex.split(text)


def _take(lines: list[str], number: int) -> tuple[str, str, int] | None:
    """The block that begins at a line: its language, empty for data, its text, and the line behind it."""
    if fence := _FENCE.match(lines[number]):
        end = lines.index("```", number + 1)
        language = {"python": PYTHON, "sh": SHELL, "bash": SHELL, "": SHELL}.get(fence[1], "")
        return language, "\n".join(lines[number + 1 : end]), end + 1
    if not lines[number].startswith("    ") or (number and lines[number - 1].strip()):
        return None
    end = number
    while end < len(lines) and lines[end].startswith("    "):
        end += 1
    return SHELL, "\n".join(line[4:] for line in lines[number:end]), end
