"""A directory with everything that a build of the small checkpoint reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.build import BuildReport, build
from engines.profile import PROFILES


@dataclass(frozen=True)
class Workshop:
    """A small checkpoint, profiles for both partitions with bound and with baked weights, and a store."""

    root: Path

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def profile(self) -> Path:
        return self.root / "bound.toml"

    @property
    def baked_profile(self) -> Path:
        return self.root / "baked.toml"

    @property
    def store(self) -> Path:
        return self.root / "store"

    def build(self, **options: Any) -> BuildReport:
        """Builds the store with bound weights."""
        return build(self.checkpoint, self.profile, self.store, **options)

    def engine_file(self, graph: str) -> Path:
        """The engine of a graph; there is one."""
        (file,) = (self.store / "engines").glob(f"{graph}.*.onnx")
        return file


def write_profile(file: Path, **changes: str) -> Path:
    """The shipped `cpu` profile on one thread, with some lines changed: `write_profile(file, weights='"baked"')`.

    It has the first tier alone: others need graphs that a small checkpoint does not have, and bound weights.
    """
    lines = (PROFILES / "cpu.toml").read_text().partition("[quality")[0].splitlines()
    for key, text in {"threads": "1", **changes}.items():
        lines = [f"{key} = {text}" if line.startswith(f"{key} =") else line for line in lines]
    file.write_text("\n".join(lines))
    return file
