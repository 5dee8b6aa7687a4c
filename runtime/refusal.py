"""How a request is refused: the field, the value, the rule and the nearest legal value, in one bounded line."""

from __future__ import annotations

import reprlib
from enum import Enum
from typing import Any


class Missing(Enum):
    """The value of a field that was not given."""

    MISSING = "missing"


MISSING = Missing.MISSING

_FIELD_LENGTH = 80
_VALUE_LENGTH = 80
_JSON_WORDS = ((True, "true"), (False, "false"), (None, "null"))


class _Bounded(reprlib.Repr):
    """`repr` that never grows with its argument and never raises."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _VALUE_LENGTH
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 1024:  # Python refuses to print integers of more than 4,300 digits
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)


def show(value: object) -> str:
    """A value as an error text shows it: JSON words, one line, at most 80 characters, printable in UTF-8."""
    for word, text in _JSON_WORDS:
        if value is word:
            return text
    line = " ".join(_Bounded().repr(value).split())
    line = line.encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= _VALUE_LENGTH else line[: _VALUE_LENGTH - 3] + "..."


class RequestError(ValueError):
    """A request that is refused. `str()` is one line; `to_dict()` is the same for programs.

    `nearest` is a legal value close to the given one, a tuple of two such values, or None where there is none.
    """

    def __init__(self, field: str, value: object, rule: str, nearest: object = None) -> None:
        super().__init__(field, value, rule, nearest)
        self.field = field if _is_plain(field) else show(field)
        self.value = value
        self.rule = rule
        self.nearest = nearest

    def __str__(self) -> str:
        got = "missing" if self.value is MISSING else f"got {show(self.value)}"
        mend = "" if self.nearest is None else f"; nearest legal: {self._nearest_text()}"
        return f"{self.field}: {got}; {self.rule}{mend}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: field, value (as shown, None when missing), rule, nearest (a list of legal values), message."""
        nearest = [one if type(one) in (str, int, float, bool) else show(one) for one in self._options()]
        value = None if self.value is MISSING else show(self.value)
        return {"field": self.field, "value": value, "rule": self.rule, "nearest": nearest, "message": str(self)}

    def _nearest_text(self) -> str:
        return " or ".join(one if isinstance(one, str) else show(one) for one in self._options())

    def _options(self) -> tuple[object, ...]:
        if self.nearest is None:
            return ()
        return self.nearest if isinstance(self.nearest, tuple) else (self.nearest,)


def _is_plain(field: str) -> bool:
    return len(field) <= _FIELD_LENGTH and field.isascii() and field.isprintable()
