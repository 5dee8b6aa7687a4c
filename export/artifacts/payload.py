"""Reads an artifact's own tensors once, before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from export.artifacts.artifact import Artifact, Patch
from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.materialise import map_stored

SLAB = 1 << 22
"""Elements that are looked at together: some tens of megabytes of memory."""


def check_finite(artifact: Artifact) -> None:
    """Sees that every number of the artifact is finite; one NaN would make all rows of all clips NaN.

    Raises:
        CheckpointError: for the first tensor that holds another, with the element's place.
    """
    seen: set[tuple[str, int]] = set()
    for patch in artifact.patches.values():
        for weight in weights(patch):
            for stored in weight.leaves():
                if (str(stored.file), stored.offset) not in seen:
                    seen.add((str(stored.file), stored.offset))
                    _check(stored)


def weights(patch: Patch) -> Iterator[Weight]:
    """The expressions that a patch is made of."""
    if patch.low_rank is not None:
        yield from (patch.low_rank.down, patch.low_rank.up)
    yield from (weight for weight in (patch.difference, patch.injected) if weight is not None)


def _check(stored: Stored) -> None:
    for index, slab in enumerate(map_stored(stored).view(-1).split(SLAB)):
        finite = torch.isfinite(slab)
        if not finite.all():
            place = int(torch.nonzero(~finite)[0])
            wanted, found = "finite numbers", f"{float(slab[place])} at element {index * SLAB + place}"
            raise CheckpointError(stored.file, stored.key, wanted, found)
