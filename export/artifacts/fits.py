"""Whether an artifact can be applied to a checkpoint."""

from __future__ import annotations

from export.artifacts.artifact import Artifact
from export.artifacts.fasth3_v2 import WholeStudent
from export.checkpoint import Checkpoint
from export.checkpoint.errors import CheckpointError
from export.checkpoint.tree import PARTITIONS, TASKS, PartitionName
from plugins.distilled import Distilled


def partition_of(distilled: Distilled) -> PartitionName:
    """The transformer that an artifact is for: the one that has its tasks."""
    return next(partition for partition in PARTITIONS if set(distilled.tasks) <= set(TASKS[partition]))


def check_fits(artifact: Artifact | WholeStudent, checkpoint: Checkpoint) -> None:
    """Sees that a checkpoint, whose sizes an artifact was read against, has its partition and is the plain base.

    Raises:
        CheckpointError: the partition is missing, or the checkpoint has a schedule of its own, or other shifts than
            the artifact was trained with.
    """
    partition = partition_of(artifact.distilled)
    if partition not in checkpoint.partitions:
        wanted = f"the partition {partition}, for {', '.join(artifact.distilled.tasks)}"
        raise CheckpointError(checkpoint.root, "partition", wanted, f"{', '.join(checkpoint.partitions)} alone")
    if checkpoint.student is not None:
        wanted = "the released model; one that an artifact was made part of would be changed twice"
        raise CheckpointError(checkpoint.root, "schedule", wanted, f"that of {checkpoint.student.name}")
    _check_shifts(artifact.distilled, checkpoint)


def _check_shifts(distilled: Distilled, checkpoint: Checkpoint) -> None:
    """FastH3 v1 was trained with the released shifts; the others bring theirs, or take the checkpoint's."""
    sizes, schedule = checkpoint.dimensions, distilled.schedule
    trained, found = (schedule.video_shift, schedule.audio_shift), (sizes.video_shift, sizes.audio_shift)
    if distilled.family == "fasth3_v1" and trained != found:
        wanted = f"{trained[0]:g} and {trained[1]:g}, with which {distilled.name} was trained"
        raise CheckpointError(checkpoint.root, "sigma shifts", wanted, f"{found[0]:g} and {found[1]:g}")
