"""Turns configuration files into typed models, with errors that name file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

from export.checkpoint.errors import CheckpointError


class Configuration(BaseModel):
    """Constructor arguments of one model class; keys it does not know are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Layers = Annotated[int, Field(ge=1, le=1000)]
"""How many there are of a kind: far more than any model has, too few to fill the memory with names of tensors."""

Parsed = TypeVar("Parsed", bound=BaseModel)


@dataclass(frozen=True)
class Translation:
    """Constructor arguments taken from native files, and the file and key that each came from."""

    arguments: dict[str, Any]
    origins: dict[str, tuple[Path, str]]

    def __or__(self, other: Translation) -> Translation:
        return Translation(self.arguments | other.arguments, self.origins | other.origins)


def translate(names: Mapping[str, str], config: Mapping[str, Any], file: Path, prefix: str = "") -> Translation:
    """Takes the values that `names` lists (constructor argument -> native key); `prefix` locates a nested `config`.

    Raises:
        CheckpointError: a key is absent.
    """
    arguments = {ours: take(config, native, file) for ours, native in names.items()}
    return Translation(arguments, {ours: (file, prefix + native) for ours, native in names.items()})


def parse(
    model: type[Parsed],
    values: Mapping[str, Any],
    file: Path,
    origins: Mapping[str, tuple[Path, str]] | None = None,
) -> Parsed:
    """Validates `values` without converting between types (a string is never a number).

    They came from `file` under the model's names, unless `origins` says otherwise.

    Raises:
        CheckpointError: for the first value that does not fit.
    """
    try:
        # Strict validation takes JSON arrays for tuples, but not Python lists: hence the way through JSON.
        return model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        # A rule over several fields has no location of its own.
        head, *inner = [str(part) for part in first["loc"]] or ["contents"]
        file, head = (origins or {}).get(head, (file, head))
        found = "nothing" if first["type"] == "missing" else repr(first["input"])[:80]
        raise CheckpointError(file, ".".join([head, *inner]), first["msg"], found) from error


def same_length(values: tuple[Any, ...], info: ValidationInfo, other: str) -> tuple[Any, ...]:
    """For field validators: `values` needs one entry for each of the field `other`, a tuple or a count.

    Raises:
        ValueError: it has another length.
    """
    wanted = info.data.get(other)  # Absent when `other` itself was refused, which is then what is reported.
    count = len(wanted) if isinstance(wanted, tuple) else wanted
    if count is not None and len(values) != count:
        raise ValueError(f"{count} values, as {other} has, not {len(values)}")
    return values


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
