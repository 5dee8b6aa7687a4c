"""Builds of the small checkpoint for an RTX card that is not there.

`python -m tests.engines.gpu_workshop ROOT [--resume]` does one in a process of its own.

The plans are real ones, for compute capability 8.9. The small graphs take the names of the transformer's, and the
planner plans for the release, since the small checkpoint has no configuration of its own.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines import build as building
from engines.build import BuildReport, build
from engines.plan import released_outline
from engines.profile import PROFILES, Profile
from engines.steps import StepEvent
from export.graphs.graph import Graph
from tests.engines import small_checkpoint

ABSENT = ("accelerate", "diffusers", "onnxscript", "transformers")
"""What a GPU's host does not need to finish a build."""

NAMES = {"attend": "block", "table": "epilogue"}


def write_gpu_profile(file: Path, shipped: str = "rtx4090", **changes: str) -> Path:
    """A shipped profile with some lines changed: `write_gpu_profile(file, weights='"baked"')`."""
    lines = (PROFILES / f"{shipped}.toml").read_text().splitlines()
    for key, text in changes.items():
        lines = [f"{key} = {text}" if line.startswith(f"{key} =") else line for line in lines]
    file.write_text("\n".join(lines))
    return file


def use_small_gpu_graphs(patch: pytest.MonkeyPatch) -> None:
    """Makes the build see the small checkpoint and its graphs under names that belong to the denoiser."""
    patch.setattr(building, "Checkpoint", small_checkpoint.SmallCheckpoint)
    patch.setattr(building, "profile_graphs", graphs)
    patch.setattr(building, "declared_graphs", lambda *arguments: graphs(*arguments, Path()))
    patch.setattr(building, "profile_sidecars", lambda *arguments: ())
    patch.setattr(building, "Outline", SimpleNamespace(read=lambda root: released_outline()))


def graphs(
    checkpoint: small_checkpoint.SmallCheckpoint, profile: Profile, partition: str, weights: Path
) -> tuple[Graph, ...]:
    """The small graphs, renamed."""
    small = small_checkpoint.graphs(checkpoint, profile, partition, weights)
    return tuple(dataclasses.replace(graph, name=NAMES[graph.name]) for graph in small)


def build_gpu(root: Path, progress: Callable[[StepEvent], None] = lambda event: None, **options: Any) -> BuildReport:
    """Builds the store of a workshop that has a checkpoint and a profile."""
    return build(root / "checkpoint", root / "gpu.toml", root / "store", progress, **options)


def main(root: Path, resume: bool) -> None:
    """Builds, and prints each event; it resumes as on a host that has no exporter."""
    if resume:
        sys.modules.update(dict.fromkeys(ABSENT))
    with pytest.MonkeyPatch.context() as patch:
        use_small_gpu_graphs(patch)
        build_gpu(root, _say, resume=resume)


def _say(event: StepEvent) -> None:
    sys.stdout.write(f"{event.status} {event.name}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), resume="--resume" in sys.argv)
