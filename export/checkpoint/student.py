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
from plugins.schedule import Schedule, ScheduleError

STUDENT = "student.json"
PARTITION = "fl2va"
"""The only partition that students are made of."""

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Path = Annotated[str, Field(pattern=r"^[^\x00]+$")]


class Base(Configuration):
    """The checkpoint that a student is of: where it lies, from the student's directory on, and which one it is.

    `sample` tells of its data, of which `fingerprint` says nothing: tensors that were fused are of these weights.
    """

    path: _Path
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
    path: _Path


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
        if self.transformer.kind == "whole" and not self.gates:
            raise ValueError("a whole transformer of no sparse attention; it has gates, so video_sparse must be there")
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
    record = parse(Student, read_object(file), file)
    check_sigmas(record.distilled.schedule, file, "distilled.schedule")
    return record


def place_of(root: Path, path: str) -> Path:
    """A directory that student.json names. Raises CheckpointError."""
    try:
        return (root.resolve() / path).resolve()
    except RuntimeError as error:  # a loop of symbolic links
        raise CheckpointError(root / STUDENT, "path", "the path of a directory", f"{path}: {error}") from error


def base_of(root: Path, record: Student) -> Path:
    """The directory of a student's base.

    Raises:
        CheckpointError: it is not there, or is a student's itself.
    """
    file, place = root / STUDENT, place_of(root, record.base.path)
    if not place.is_dir():
        wanted = "the base checkpoint's directory; move it back there, or make the student again"
        raise CheckpointError(file, "base.path", wanted, f"no such directory: {place}")
    if is_student(place):
        raise CheckpointError(file, "base.path", "a checkpoint that is no student itself", place)
    return place


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


def check_sigmas(schedule: PinnedSchedule, file: Path, key: str) -> None:
    """Sees that a schedule, which is read from a file, can be run: no two of its sigmas are equal in float32.

    Raises:
        CheckpointError: some are; `key` is the schedule's place in the file.
    """
    try:
        forwards = Schedule.pinned(schedule).forwards
    except ScheduleError as error:
        raise CheckpointError(file, key, "sigmas that differ in float32", error) from error
    if forwards != schedule.forwards:
        raise CheckpointError(file, key, f"{schedule.forwards} sigmas that differ in float32", forwards)


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
        key = "sigma_shift_scales" if "shift" in str(first["loc"]) else "base_schedule"
        raise CheckpointError(file, f"_minimax_h3.{key}", first["msg"], repr(first["input"])[:80]) from error
    check_sigmas(schedule, file, "_minimax_h3.base_schedule")
    return Distilled(name="merged", family="merged", tasks=tuple(tasks), schedule=schedule)


def _schedule(positions: list[float], shifts: Any) -> PinnedSchedule:
    scales: Mapping[str, Any] = shifts if isinstance(shifts, dict) else {}
    return PinnedSchedule(
        forwards=len(positions) - 1,
        positions=tuple(float(position) for position in positions),
        video_shift=scales.get("video"),  # type: ignore[arg-type]  # pydantic refuses what is no number
        audio_shift=scales.get("audio"),  # type: ignore[arg-type]
    )
