"""The fields of one request: one winner each, and the notes that the answer will carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.contract import FIELD, Given, Status, occurrences
from runtime.refusal import MISSING, RequestError, show
from runtime.task import Task


class GivenFields:
    """The fields that were given, checked. Raises RequestError for a parameters object that is refused."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        self._given: dict[str, Given] = {}
        for one in occurrences(parameters):
            self._admit(one)

    def _admit(self, one: Given) -> None:
        other = self._given.get(one.field.name, one)
        winner, loser = (one, other) if one.rank <= other.rank else (other, one)
        self._given[one.field.name] = winner
        if loser.value != winner.value:
            self._give_way(loser, winner)
        if one.field.status is Status.ACCEPTED:
            self.notes.append(f"{one.spelling} has no effect: {one.field.meaning}")

    def _give_way(self, loser: Given, winner: Given) -> None:
        self.notes.append(f"{loser.spelling} {show(loser.value)} gives way to {winner.spelling} {show(winner.value)}")

    def given(self, name: str) -> Given | None:
        """The field as it was given, or None."""
        return self._given.get(name)

    def spelling(self, name: str) -> str:
        """How the request writes a field."""
        found = self._given.get(name)
        return name if found is None else found.spelling

    def value(self, name: str, default: Any = None) -> Any:
        """The given value, else `default`, else the table's default."""
        found = self._given.get(name)
        if found is not None:
            return found.value
        return FIELD[name].default if default is None else default

    def required(self, name: str, task: Task) -> Any:
        """The given value. Raises RequestError without."""
        found = self._given.get(name)
        if found is None:
            raise RequestError(name, MISSING, f"required for {task}; {FIELD[name].kind.rule}")
        return found.value

    def first(self, *names: str) -> Given | None:
        """The first field given; those after it give way, with a note."""
        found = [one for one in map(self.given, names) if one is not None]
        for loser in found[1:]:
            self._give_way(loser, found[0])
        return found[0] if found else None

    def note_fields_of_others(self, task: Task) -> None:
        """Notes the fields that have a meaning for other tasks only."""
        for one in self._given.values():
            if one.field.status is Status.OFFERED and task not in one.field.tasks and one.value != one.field.default:
                self.notes.append(f"{one.spelling} has no effect for {task}")
