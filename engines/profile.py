"""A hardware profile: one TOML file that says which backend builds and runs the engines, and within which limits."""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engines import machine

PROFILES = Path(__file__).parent / "profiles"
"""Directory of the profiles that are shipped."""

_MEMORY = re.compile(r"(?P<number>\d+(\.\d+)?) *(?P<unit>%|MiB|GiB)")
_MEMORY_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}

MOST_THREADS = 1024

Partition = Literal["fl2va", "ref2va"]
PARTITIONS: tuple[Partition, ...] = get_args(Partition)


class ProfileError(ValueError):
    """A profile that cannot be used; says file, key, value and rule."""


class Profile(BaseModel):
    """The typed content of a profile file; `name` is what `load` finds it by: a shipped name, else the file's path."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    backend: Literal["onnxruntime"]
    compute: Literal["float32"]
    weights: Literal["bound", "baked"]
    partitions: Annotated[tuple[Partition, ...], Field(min_length=1, strict=False)]
    threads: int | Literal["auto"]
    memory: str

    @field_validator("partitions")
    @classmethod
    def _each_once(cls, value: tuple[Partition, ...]) -> tuple[Partition, ...]:
        if len(set(value)) < len(value):
            raise ValueError("must name each partition once")
        if "fl2va" not in value:
            raise ValueError("must name fl2va, which text to video and audio runs on")
        return value

    @field_validator("threads", mode="before")
    @classmethod
    def _count(cls, value: object) -> object:
        if value != "auto" and (type(value) is not int or not 1 <= value <= MOST_THREADS):
            raise ValueError(f'must be a whole number from 1 to {MOST_THREADS}, or "auto"')
        return value

    @field_validator("memory", mode="before")
    @classmethod
    def _amount(cls, value: object) -> object:
        match = _MEMORY.fullmatch(value) if isinstance(value, str) else None
        if not match or not (0 < float(match["number"]) <= (100 if match["unit"] == "%" else float("inf"))):
            raise ValueError('must be a share such as "80%" (above 0%, at most 100%) or an amount such as "12 GiB"')
        return value

    @staticmethod
    def load(profile: str | Path) -> Profile:
        """Reads a shipped profile by name, or a file by path (a name with the suffix `.toml`).

        Raises:
            ProfileError: no such profile, not TOML, a missing or unknown key, an illegal value.
        """
        path = _find(profile)
        try:
            name = path.stem if path.parent == PROFILES else str(path.absolute())
            return Profile(name=name, **_without_name(path, tomllib.loads(path.read_text())))
        except tomllib.TOMLDecodeError as error:
            raise ProfileError(f"{path}: not a TOML file: {error}") from error
        except ValidationError as error:
            raise ProfileError("\n".join(_explain(path, e) for e in error.errors())) from error

    def thread_count(self) -> int:
        """Threads of one session on this machine."""
        return machine.available_processors() if self.threads == "auto" else self.threads

    def memory_budget(self, machine_bytes: int) -> int:
        """Bytes that a request may use on a machine with that much memory."""
        match = _MEMORY.fullmatch(self.memory)
        if match is None:
            raise ProfileError(f"memory = {self.memory!r}: neither a share nor an amount")
        number, unit = float(match["number"]), match["unit"]
        wanted = machine_bytes * number / 100 if unit == "%" else number * _MEMORY_UNITS[unit]
        return min(machine_bytes, int(wanted))


def _find(profile: str | Path) -> Path:
    path = Path(profile)
    if path.suffix != ".toml":
        path = PROFILES / f"{profile}.toml"
    if not path.is_file():
        shipped = ", ".join(sorted(p.stem for p in PROFILES.glob("*.toml")))
        raise ProfileError(f"profile {str(profile)!r}: no file {path}; shipped profiles: {shipped}")
    return path


def _without_name(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    if "name" in table:
        raise ProfileError(f"{path}: name = {table['name']!r}: must not be given; a profile is named by its file")
    return table


def _explain(path: Path, error: Any) -> str:
    """One line for one of pydantic's errors: file, key, value, rule."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{path}: {key}: is missing"
    if error["type"] == "extra_forbidden":
        known = [k for k in Profile.model_fields if k != "name"]
        close = get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
        return f"{path}: {key} = {error['input']!r}: unknown key; {hint}"
    return f"{path}: {key} = {error['input']!r}: {error['msg'].removeprefix('Value error, ')}"
