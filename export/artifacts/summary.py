"""What an artifact is, as data for `inspect` and reports."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from export.artifacts.artifact import Artifact, Patch
from export.artifacts.fasth3_v2 import WholeStudent
from export.artifacts.fits import partition_of
from export.artifacts.payload import weights
from export.checkpoint.components.denoiser import GATE
from plugins.distilled import Family

APPLICATION: dict[Family, Literal["fused", "whole", "switchable"]] = {
    "fasth3_v1": "fused",
    "fasth3_v2": "whole",
    "turbo": "switchable",
    "flashgen": "switchable",
}
"""How a family's artifacts are used: made one with the base for good, in its place, or chosen by each request."""


@dataclass(frozen=True)
class Touched:
    """Parameters that are changed alike; `parameters` has * for the number of the block."""

    parameters: str
    count: int
    change: str


@dataclass(frozen=True)
class Summary:
    """An artifact. `distilled` is what requests are bound to, `nbytes` the size of its tensors."""

    path: str
    application: Literal["fused", "whole", "switchable"]
    partition: str
    distilled: dict[str, Any]
    nbytes: int
    touched: tuple[Touched, ...]
    metadata: dict[str, str]

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(asdict(self), indent=1)


def summarise(artifact: Artifact | WholeStudent) -> Summary:
    """Counts what an artifact changes, and how; reads no tensor data."""
    distilled = artifact.distilled
    if isinstance(artifact, WholeStudent):
        changes, metadata = _replacements(artifact), {"base_revision": artifact.revision}
    else:
        changes, metadata = _changes(artifact), dict(artifact.metadata)
    return Summary(
        path=str(artifact.path),
        application=APPLICATION[distilled.family],
        partition=partition_of(distilled),
        distilled=distilled.model_dump(mode="json"),
        nbytes=_nbytes(artifact),
        touched=tuple(_touched(changes)),
        metadata=metadata,
    )


def _nbytes(artifact: Artifact | WholeStudent) -> int:
    if isinstance(artifact, WholeStudent):
        return sum(stored.nbytes for stored in artifact.files.tensors.values())
    leaves = {
        leaf.offset: leaf.nbytes
        for patch in artifact.patches.values()
        for weight in weights(patch)
        for leaf in weight.leaves()
    }
    return sum(leaves.values())


def _changes(artifact: Artifact) -> Iterator[tuple[str, str]]:
    for name, patch in artifact.patches.items():
        yield name, _change(patch)


def _replacements(student: WholeStudent) -> Iterator[tuple[str, str]]:
    for name in student.files.tensors:
        yield name, "added" if name.endswith(GATE) else "replaced"


def _change(patch: Patch) -> str:
    parts = []
    if patch.low_rank is not None:
        parts.append(f"rank {patch.low_rank.down.shape[0]} x {patch.low_rank.scale:g}")
    if patch.difference is not None:
        parts.append("difference")
    if patch.injected is not None:
        parts.append("added")
    return " + ".join(parts)


def _touched(changes: Iterator[tuple[str, str]]) -> Iterator[Touched]:
    counts = Counter((re.sub(r"(?<=blocks\.)\d+", "*", name), change) for name, change in changes)
    for (parameters, change), count in counts.items():
        yield Touched(parameters, count, change)
