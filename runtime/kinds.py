"""Kinds of request values. A kind states its rule in words and checks a value against exactly that rule.

Types are exact: a boolean is not a number, 5.0 is not an integer, "5" is not a number, null is not "left out".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

from plugins.shape import ratio_of
from runtime.refusal import RequestError


class Kind(Protocol):
    """What every kind offers."""

    @property
    def type_name(self) -> str:
        """The JSON type, for the table of fields."""

    @property
    def range_text(self) -> str:
        """The legal values, for the table of fields."""

    @property
    def rule(self) -> str:
        """The rule as error texts state it."""

    def check(self, spelling: str, value: object) -> object:
        """The value in its canonical form. Raises RequestError under the name the user spelled."""


@dataclass(frozen=True)
class Integer:
    """An integer written without fraction or exponent, in a closed range or among the `exempt` values outside it."""

    minimum: int
    maximum: int
    unit: str = ""
    exempt: tuple[int, ...] = ()
    type_name = "integer"

    @property
    def range_text(self) -> str:
        extra = "".join(f", or {value}" for value in self.exempt)
        return f"{self.minimum} to {self.maximum}{_unit(self.unit)}{extra}"

    @property
    def rule(self) -> str:
        return f"must be an integer from {self.range_text}"

    def check(self, spelling: str, value: object) -> int:
        if type(value) is int and (self.minimum <= value <= self.maximum or value in self.exempt):
            return value
        raise RequestError(spelling, value, self.rule, self._nearest(value))

    def _nearest(self, value: object) -> int | None:
        clamped = _clamp(value, self.minimum, self.maximum)
        return None if clamped is None else round(clamped)


@dataclass(frozen=True)
class Step:
    """An integer of a range with a step, such as sides on a grid."""

    values: range
    unit: str = ""
    type_name = "integer"

    @property
    def range_text(self) -> str:
        return f"{self.values[0]} to {self.values[-1]}{_unit(self.unit)} in steps of {self.values.step}"

    @property
    def rule(self) -> str:
        return f"must be an integer from {self.range_text}"

    def check(self, spelling: str, value: object) -> int:
        if type(value) is int and value in self.values:
            return value
        clamped = _clamp(value, self.values[0], self.values[-1])
        nearest = None if clamped is None else min(self.values, key=lambda one: abs(one - clamped))
        raise RequestError(spelling, value, self.rule, nearest)


@dataclass(frozen=True)
class Number:
    """A finite number in a closed range, returned as float."""

    minimum: float
    maximum: float
    unit: str = ""
    type_name = "number"

    @property
    def range_text(self) -> str:
        if self.minimum == self.maximum:
            return f"exactly {self.minimum:g}"
        return f"{self.minimum:g} to {self.maximum:g}{_unit(self.unit)}"

    @property
    def rule(self) -> str:
        joint = "" if self.minimum == self.maximum else "from "
        return f"must be a number, {joint}{self.range_text}"

    def check(self, spelling: str, value: object) -> float:
        # The comparison is exact for integers of any size and false for NaN, so float() below cannot overflow.
        if type(value) in (int, float) and self.minimum <= value <= self.maximum:  # type: ignore[operator]
            return float(value)  # type: ignore[arg-type]
        raise RequestError(spelling, value, self.rule, _clamp(value, self.minimum, self.maximum))


@dataclass(frozen=True)
class Boolean:
    """true or false."""

    type_name = "boolean"
    range_text = "true, false"
    rule = "must be true or false"

    def check(self, spelling: str, value: object) -> bool:
        if type(value) is bool:
            return value
        raise RequestError(spelling, value, self.rule)


@dataclass(frozen=True)
class Text:
    """A string counted in Unicode characters, encodable as UTF-8, without U+0000. Kept verbatim."""

    minimum: int
    maximum: int
    type_name = "string"

    @property
    def range_text(self) -> str:
        return f"{self.minimum} to {self.maximum} characters"

    @property
    def rule(self) -> str:
        return f"must be a string of {self.range_text}"

    def check(self, spelling: str, value: object) -> str:
        if type(value) is not str:
            raise RequestError(spelling, value, self.rule)
        if not self.minimum <= len(value) <= self.maximum:
            raise RequestError(spelling, value, f"{self.rule}, this one has {len(value)}")
        if "\0" in value or not is_unicode(value):
            raise RequestError(spelling, value, "must be valid Unicode without U+0000 and without lone surrogates")
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few words; upper and lower case are the same where `any_case` is set."""

    values: tuple[str, ...]
    any_case: bool = False
    type_name = "string"

    @property
    def range_text(self) -> str:
        return ", ".join(self.values)

    @property
    def rule(self) -> str:
        return f"must be one of {self.range_text}"

    def check(self, spelling: str, value: object) -> str:
        word = value.lower() if self.any_case and type(value) is str else value
        if type(word) is str and word in self.values:
            return word
        raise RequestError(spelling, value, self.rule)


@dataclass(frozen=True)
class WholeSeconds:
    """Whole seconds as an integer or as the digits that an HTML form sends, returned as float."""

    minimum: int
    maximum: int
    type_name = "integer, or its digits as a string"

    @property
    def range_text(self) -> str:
        return f"{self.minimum} to {self.maximum} seconds"

    @property
    def rule(self) -> str:
        return f"must be whole seconds from {self.minimum} to {self.maximum} (decimals go in duration)"

    def check(self, spelling: str, value: object) -> float:
        is_digits = type(value) is str and re.fullmatch(r"[1-9][0-9]{0,8}", value)
        number = int(value) if is_digits else value  # type: ignore[call-overload]
        if type(number) is int and self.minimum <= number <= self.maximum:
            return float(number)
        nearest = _clamp(number, self.minimum, self.maximum)
        raise RequestError(spelling, value, self.rule, None if nearest is None else round(nearest))


@dataclass(frozen=True)
class Sides:
    """`WIDTHxHEIGHT` in pixels, both within the range of one side; returned as (width, height)."""

    minimum: int
    maximum: int
    type_name = "string"

    @property
    def range_text(self) -> str:
        return f"WIDTHxHEIGHT, each {self.minimum} to {self.maximum} px"

    @property
    def rule(self) -> str:
        return f"must be {self.range_text}"

    def check(self, spelling: str, value: object) -> tuple[int, int]:
        found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", value) if type(value) is str else None
        if found is None:
            raise RequestError(spelling, value, self.rule)
        width, height = (int(side) for side in found.groups())
        nearest = tuple(min(max(side, self.minimum), self.maximum) for side in (width, height))
        if nearest != (width, height):
            raise RequestError(spelling, value, self.rule, f"{nearest[0]}x{nearest[1]}")
        return width, height


@dataclass(frozen=True)
class AspectRatio:
    """One of the named ratios, as its name or as a number (or its decimal digits) within 1e-6; returns the name.

    automatic: words that leave the ratio to the task.
    """

    names: tuple[str, ...]
    automatic: tuple[str, ...] = ()
    type_name = "string or number"

    @property
    def range_text(self) -> str:
        return ", ".join((*self.names, *self.automatic)) + ", or width/height within 1e-6"

    @property
    def rule(self) -> str:
        return f"must be one of {self.range_text}"

    def check(self, spelling: str, value: object) -> str:
        if type(value) is str and value in (*self.names, *self.automatic):
            return value
        number = _decimal(value)
        nearest = None if number is None else min(self.names, key=lambda name: abs(ratio_of(name) - number))
        if number is None or nearest is None or abs(ratio_of(nearest) - number) > 1e-6:
            raise RequestError(spelling, value, self.rule, nearest)
        return nearest


@dataclass(frozen=True)
class Anything:
    """Any value: the field belongs to a feature that is not offered, so its contents are not looked into."""

    type_name = "any"
    range_text = "-"
    rule = "not offered"

    def check(self, spelling: str, value: object) -> object:
        return value


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8, that is, holds no lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""


def _decimal(value: object) -> float | None:
    if type(value) is str and re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,30})?", value):
        return float(value)
    if type(value) in (int, float) and 0 < value < 1e4:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    return None


def _clamp(value: object, minimum: float, maximum: float) -> float | None:
    if type(value) not in (int, float) or (type(value) is float and math.isnan(value)):
        return None
    return min(max(value, minimum), maximum)  # type: ignore[call-overload]
