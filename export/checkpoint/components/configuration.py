"""Turns configuration files into typed models, with errors that name file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from export.checkpoint.errors import CheckpointError


class Configuration(BaseModel):
    """Constructor arguments of one model class; keys it does not know are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Parsed = TypeVar("Parsed", bound=BaseModel)


def parse(model: type[Parsed], values: Mapping[str, Any], file: Path) -> Parsed:
    """Validates `values`, which came from `file`, without converting between types (a string is never a number).

    Raises:
        CheckpointError: for the first value that does not fit.
    """
    try:
        # Strict validation takes JSON arrays for tuples, but not Python lists: hence the way through JSON.
        return model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "configuration"
        found = "nothing" if first["type"] == "missing" else repr(first["input"])[:80]
        raise CheckpointError(file, key, first["msg"], found) from error


def constructor_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """A diffusers config.json without its private keys (`_class_name`, `_diffusers_version`, ...)."""
    return {key: value for key, value in config.items() if not key.startswith("_")}


def take(config: Mapping[str, Any], key: str, file: Path) -> Any:
    """One value of a native configuration file.

    Raises:
        CheckpointError: the key is absent.
    """
    if key not in config:
        raise CheckpointError(file, key, "a value", "nothing")
    return config[key]


def take_size(config: Mapping[str, Any], key: str, file: Path) -> int:
    """One positive integer of a native configuration file.

    Raises:
        CheckpointError: the key is absent, or holds something else.
    """
    (size,) = _sizes(config, key, [take(config, key, file)], file)
    return size


def take_sizes(config: Mapping[str, Any], key: str, file: Path) -> list[int]:
    """A list of positive integers of a native configuration file.

    Raises:
        CheckpointError: the key is absent, or holds something else.
    """
    return _sizes(config, key, take(config, key, file), file)


def _sizes(config: Mapping[str, Any], key: str, values: Any, file: Path) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value > 0 for value in values):
        raise CheckpointError(file, key, "positive integers", repr(config[key])[:80])
    return values


def require(config: Mapping[str, Any], key: str, wanted: Any, file: Path) -> None:
    """Checks a value that must be as given, because nothing else is built.

    Raises:
        CheckpointError: the key is absent or has another value.
    """
    value = take(config, key, file)
    if value != wanted:
        raise CheckpointError(file, key, repr(wanted), repr(value)[:80])
