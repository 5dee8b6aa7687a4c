"""Reads the `__metadata__` of artifacts: strings that must be there, and be what their family says."""

from __future__ import annotations

import math
import re

from export.checkpoint.errors import CheckpointError
from export.checkpoint.safetensors_file import Header
from plugins.distilled import falls_to_zero

_ORDERS = re.compile(r"(layout|order)$", re.IGNORECASE)


def take(header: Header, key: str, rule: str) -> str:
    """A value that must be there; `rule` says what it must be, for the error.

    Raises:
        CheckpointError: it is absent.
    """
    if key not in header.metadata:
        raise CheckpointError(header.file, f"__metadata__.{key}", rule, "nothing")
    return header.metadata[key]


def require(header: Header, key: str, wanted: str) -> None:
    """A value that must be as given. Raises CheckpointError."""
    value = take(header, key, repr(wanted))
    if value != wanted:
        raise CheckpointError(header.file, f"__metadata__.{key}", repr(wanted), repr(value)[:120])


def take_count(header: Header, key: str, rule: str = "a whole number") -> int:
    """A value that counts something. Raises CheckpointError."""
    value = take(header, key, rule)
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise CheckpointError(header.file, f"__metadata__.{key}", rule, repr(value)[:120])
    return int(value)


def require_count(header: Header, key: str, wanted: int, rule: str) -> None:
    """A count that must be as given. Raises CheckpointError."""
    value = take_count(header, key, f"{wanted}, {rule}")
    if value != wanted:
        raise CheckpointError(header.file, f"__metadata__.{key}", f"{wanted}, {rule}", value)


def take_number(header: Header, key: str, rule: str) -> float:
    """A value that is a positive finite number. Raises CheckpointError."""
    value = take(header, key, rule)
    number = _number(value)
    if number is None or not number > 0:
        raise CheckpointError(header.file, f"__metadata__.{key}", rule, repr(value)[:120])
    return number


def take_positions(header: Header, key: str, count: int) -> tuple[float, ...]:
    """Positions of a schedule, "p0,p1,...,0": `count` numbers that fall from at most 1 to 0.

    Raises:
        CheckpointError: the value is absent or something else.
    """
    rule = f"{count} numbers that fall strictly, from at most 1 to 0, with commas between them"
    value = take(header, key, rule)
    numbers = tuple(_number(part) for part in value.split(",")[: count + 1])
    positions = tuple(number for number in numbers if number is not None)
    if len(numbers) != count or len(positions) != count or not falls_to_zero(positions):
        raise CheckpointError(header.file, f"__metadata__.{key}", rule, repr(value)[:120])
    return positions


def _number(text: str) -> float | None:
    """The finite number that a short text is."""
    if not re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?\s*", text, re.ASCII) or len(text) > 40:
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def refuse_orders(header: Header, known: tuple[str, ...] = ()) -> None:
    """Refuses a file that says something of the order of its rows which its family does not know.

    A fused projection in another order has the same shape, and would be fused into noise.

    Raises:
        CheckpointError: there is an entry about a layout or an order that is not one of `known`.
    """
    for key, value in header.metadata.items():
        if _ORDERS.search(key) and key not in known:
            wanted = f"no entry about orders of rows{' but ' if known else ''}{', '.join(known)}"
            raise CheckpointError(header.file, f"__metadata__.{key}", wanted, repr(value)[:120])
