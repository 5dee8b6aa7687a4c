"""Turns what readers and decoders raise into a RequestError that names the field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.refusal import RequestError

_TEXT_LENGTH = 160


@contextmanager
def refusing(where: str, value: str, rule: str) -> Iterator[None]:
    """Any error inside becomes a RequestError: decoders of hostile bytes raise whatever they hit first."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(where, value, f"{rule}: {_line(error)}") from error


def _line(error: Exception) -> str:
    # FFmpeg's errors carry a number and the name of a C function as well.
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    text = " ".join(said.split())
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 3] + "..."
