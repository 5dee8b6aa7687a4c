"""Makes students: the directory of a checkpoint that is a base with an artifact applied to it for good."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from export.artifacts.artifact import Artifact
from export.artifacts.fasth3_v2 import TRANSFORMER, WholeStudent
from export.artifacts.fusion import FusionError, Progress, plan_fusion
from export.checkpoint import Checkpoint
from export.checkpoint.hashes import file_hash, write_listed
from export.checkpoint.student import PARTITION, STUDENT, Base, Fused, Student, Whole
from export.whole_file import sync_directory


def fuse(
    artifact: Artifact | WholeStudent,
    checkpoint: Checkpoint,
    directory: Path,
    progress: Progress = lambda key, written, size: None,
) -> Checkpoint:
    """Writes a student into a new or empty directory and opens it.

    The directory has what the artifact changes; all else is read from the checkpoint, and a whole transformer from the
    artifact, where they lie. It appears when it is complete.

    Raises:
        FusionError: the artifact is one that requests choose, the checkpoint is no base, either has changed since it
            was opened, a result is not finite, or the disk is full.
        FileExistsError: the directory is not empty.
        CheckpointError: the artifact does not fit the checkpoint.
    """
    _check_fusable(artifact, checkpoint)
    with _staged(directory.resolve()) as (scratch, final):
        base = Base(path=_from(final, checkpoint.root), fingerprint=checkpoint.fingerprint, sample=checkpoint.sample)
        transformer: Fused | Whole
        sums: dict[Path, str] = {}
        if isinstance(artifact, WholeStudent):
            transformer = Whole(kind="whole", path=_from(final, artifact.path / TRANSFORMER))
        else:
            fusion = plan_fusion(artifact, checkpoint, PARTITION, scratch, "transformer")
            sums[fusion.path] = fusion.write(progress)
            transformer = Fused(kind="fused", file=fusion.path.name, bytes=fusion.size)
        _check_unchanged(artifact, checkpoint)
        student = Student(
            schema_version=1,
            base=base,
            transformer=transformer,
            distilled=artifact.distilled,
        )
        file = scratch / STUDENT
        file.write_text(student.model_dump_json(indent=2) + "\n", encoding="utf-8")
        write_listed(scratch, {**sums, file: file_hash(file)})
        Checkpoint.open(scratch)
    return Checkpoint.open(directory)


def _check_fusable(artifact: Artifact | WholeStudent, checkpoint: Checkpoint) -> None:
    name, family = artifact.distilled.name, artifact.distilled.family
    if family not in ("fasth3_v1", "fasth3_v2"):
        raise FusionError(
            f"{artifact.path}: {name}, of family {family}, is not fused for good, as requests may choose it: "
            f"h3trt engines build --checkpoint {checkpoint.root} --adapter {artifact.path}"
        )
    if checkpoint.student is not None:
        raise FusionError(f"{checkpoint.root}: has the schedule of {checkpoint.student.name} already; name its base")


def _check_unchanged(artifact: Artifact | WholeStudent, checkpoint: Checkpoint) -> None:
    """Sees that what was read by offsets, for many minutes, is what was checked before. Raises FusionError."""
    pin, now = artifact.distilled.sha256, Checkpoint.open(checkpoint.root)
    if pin is not None and file_hash(artifact.path) != pin:
        raise FusionError(f"{artifact.path}: has changed since it was opened; fuse it again when nothing writes to it")
    if (now.fingerprint, now.sample) != (checkpoint.fingerprint, checkpoint.sample):
        raise FusionError(f"{checkpoint.root}: has changed since it was opened; fuse again when nothing writes to it")


def _from(directory: Path, place: Path) -> str:
    """The way from a student's directory to another; absolute where they share no more than the root."""
    place = place.resolve()
    shared = os.path.commonpath([directory.resolve(), place])
    return str(place) if shared == os.sep else os.path.relpath(place, directory.resolve())


@contextmanager
def _staged(directory: Path) -> Iterator[tuple[Path, Path]]:
    """A scratch directory beside `directory`, which becomes it when the block ends and vanishes if that fails.

    What an interrupted run has left is removed; one process at a time may make a student.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory}: not empty; a student is written into a new or empty directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{directory.name}.fusing-"
    for left in directory.parent.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(left)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=prefix))
    try:
        yield scratch, directory
        scratch.chmod(0o755)
        sync_directory(scratch)
        scratch.replace(directory)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sync_directory(directory.parent)
