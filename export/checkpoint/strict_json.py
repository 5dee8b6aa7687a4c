"""JSON objects as checkpoints have them: UTF-8, no key twice, no NaN or infinity."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from export.checkpoint.errors import CheckpointError


def parse_object(file: Path, part: str, raw: bytes) -> dict[str, Any]:
    """Parses `raw`, which is the `part` ("header", "contents") of `file` that errors name.

    Raises:
        CheckpointError: it is not a JSON object, or an object in it has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key, count in counts.items() if count > 1)
            raise CheckpointError(file, twice, "one entry", f"the key twice in the {part}")
        return table

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, part, "a JSON object in UTF-8", error) from error
    if not isinstance(value, dict):
        raise CheckpointError(file, part, "a JSON object", type(value).__name__)
    return value


MAX_BYTES = 1 << 24
"""Of a file: far more than any index or configuration has, and too little to fill the memory with its objects."""


def read_object(file: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable or too long, or is not such an object.
    """
    try:
        if file.is_fifo() or file.is_char_device():  # they may have no end, or no beginning
            raise CheckpointError(file, "file", "a JSON file", "a pipe or a device")
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise CheckpointError(file, "contents", f"at most {MAX_BYTES} bytes", f"{file.stat().st_size} bytes")
    except OSError as error:
        raise CheckpointError(file, "file", "a JSON file", error.strerror or "unreadable") from error
    return parse_object(file, "contents", raw)


def section(values: dict[str, Any], key: str, file: Path) -> dict[str, Any]:
    """A nested object of `values`, which came from `file`.

    Raises:
        CheckpointError: the key is absent, or does not hold an object.
    """
    value = values.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(file, key, "an object", "nothing" if value is None else repr(value)[:80])
    return value
