"""Students: few-step models that share all but their transformer, or even most of that, with a base checkpoint.

The directory of one holds `student.json`, and the tensors that fusing an adapter has made. Everything else is read
where it lies: from the base, or from the directory of a transformer that was released alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator

from export.checkpoint.components.configuration import Configuration, parse
from export.checkpoint.errors import CheckpointError
from export.checkpoint.strict_json import read_object
from export.checkpoint.tree import TASKS, Tree, native_declaration
from plugins.distilled import Distilled, PinnedSchedule

STUDENT = "student.json"
PARTITION = "fl2va"
"""The only partition that students are made of."""

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Base(Configuration):
    """The checkpoint that a student is of: where it lies, from the student's directory on, and which one it is.

    `sample` tells of its data, of which `fingerprint` says nothing: tensors that were fused are of these weights.
    """

    path: Annotated[str, Field(min_length=1)]
    fingerprint: _Sha256
    sample: _Sha256


class Fused(Configuration):
    """A transformer that is its base's but for the tensors of one file of the student's directory, of so many bytes."""

    kind: Literal["fused"]
    file: str
    bytes: PositiveInt

    @field_validator("file")
    @classmethod
    def _is_plain(cls, file: str) -> str:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError("must be the name of a .safetensors file in the same directory")
        return file


class Whole(Configuration):
    """A transformer of its own in the diffusers layout: its directory, from the student's on."""

    kind: Literal["whole"]
    path: Annotated[str, Field(min_length=1)]


class Student(Configuration):
    """What student.json says."""

    schema_version: Literal[1]
    base: Base
    transformer: Annotated[Fused | Whole, Field(discriminator="kind")]
    distilled: Distilled

    @model_validator(mode="after")
    def _check_kind(self) -> Student:
        kinds = {"fasth3_v1": "fused", "fasth3_v2": "whole"}
        distilled = self.distilled
        if kinds.get(distilled.family) != self.transformer.kind:
            raise ValueError(f"a {self.transformer.kind} transformer of family {distilled.family}; must be of {kinds}")
        if distilled.tasks != ("t2va",):
            raise ValueError(f"tasks {list(distilled.tasks)}; a student's must be ['t2va']")
        return self

    @property
    def gates(self) -> bool:
        """Whether the transformer's blocks have a gate."""
        return self.distilled.video_sparse is not None


def is_student(root: Path) -> bool:
    """Whether a directory is that of a student."""
    return (root / STUDENT).is_file()


def read_student(root: Path) -> Student:
    """Reads a student's student.json.

    Raises:
        CheckpointError: it is missing, or not what it must be.
    """
    file = root / STUDENT
    return parse(Student, read_object(file), file)


def place_of(root: Path, path: str) -> Path:
    """A directory that student.json names."""
    return (root.resolve() / path).resolve()


def declared_student(tree: Tree) -> Distilled | None:
    """What a checkpoint says of itself that was merged with an adapter: the schedule that it was distilled for.

    Raises:
        CheckpointError: the schedule or the tasks are wrong, or its partitions have different ones.
    """
    if tree.layout != "native":
        return None
    first, *others = (_declared(tree.folders[name], name) for name in tree.partitions)
    for name, other in zip(tree.partitions[1:], others, strict=True):
        if (other and other.schedule) != (first and first.schedule):
            wanted = f"that of {tree.partitions[0]}, or to be opened by its own folder"
            raise CheckpointError(_index(tree.folders[name]), "_minimax_h3.base_schedule", wanted, "another schedule")
    if first is None:
        return None
    tasks = [task for each in (first, *others) if each for task in each.tasks]
    return first.model_copy(update={"tasks": tuple(dict.fromkeys(tasks))})


def _index(folder: Path) -> Path:
    return folder / "model_index.json"


def _declared(folder: Path, partition: str) -> Distilled | None:
    declaration, file = native_declaration(folder), _index(folder)
    if "base_schedule" not in declaration:
        return None
    positions = declaration["base_schedule"]
    numbers = isinstance(positions, list) and all(type(one) in (int, float) and 0 <= one <= 1 for one in positions)
    if not numbers or len(positions) < 2:
        wanted = "a list of numbers that fall from at most 1 to 0"
        raise CheckpointError(file, "_minimax_h3.base_schedule", wanted, repr(positions)[:80])
    tasks = declaration.get("tasks")
    if not isinstance(tasks, list) or not tasks or not all(task in TASKS[partition] for task in tasks):
        raise CheckpointError(file, "_minimax_h3.tasks", f"some of {list(TASKS[partition])}", repr(tasks)[:80])
    try:
        schedule = _schedule(positions, declaration.get("sigma_shift_scales"))
    except ValidationError as error:
        first = error.errors()[0]
        key = "_minimax_h3.sigma_shift_scales" if first["loc"] else "_minimax_h3.base_schedule"
        raise CheckpointError(file, key, first["msg"], repr(first["input"])[:80]) from error
    return Distilled(name="merged", family="merged", tasks=tuple(tasks), schedule=schedule)


def _schedule(positions: list[float], shifts: Any) -> PinnedSchedule:
    scales: Mapping[str, Any] = shifts if isinstance(shifts, dict) else {}
    return PinnedSchedule(
        forwards=len(positions) - 1,
        positions=tuple(float(position) for position in positions),
        video_shift=scales.get("video"),  # type: ignore[arg-type]  # pydantic refuses what is no number
        audio_shift=scales.get("audio"),  # type: ignore[arg-type]
    )
