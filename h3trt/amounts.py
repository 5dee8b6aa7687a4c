"""Amounts of memory and disk, as options take them and as results tell them."""

from __future__ import annotations

import re

from h3trt.exits import CommandError

_UNITS = {"MiB": 20, "GiB": 30, "TiB": 40}
_AMOUNT = re.compile(rf"(?P<number>[0-9]{{1,6}}) *(?P<unit>{'|'.join(_UNITS)})")


def bytes_of(option: str, text: str, also: str = "") -> int:
    """The bytes of an amount such as 256MiB. also: what else the option takes, for the error. Raises CommandError."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise CommandError(f"{option} {text!r}: must be {also}an amount such as 500MiB or 20GiB")
    return int(found["number"]) << _UNITS[found["unit"]]


def amount(count: int) -> str:
    """A number of bytes as results tell it."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
