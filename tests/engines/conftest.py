"""Builds of the small checkpoint, through the real build."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_checkpoint

from engines import build as building
from engines.build import BuildReport, build
from engines.profile import PROFILES


@dataclass(frozen=True)
class Workshop:
    """A directory with a small checkpoint, a profile for both partitions, and the store built from them."""

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

    def build(self, **options: object) -> BuildReport:
        return build(self.checkpoint, self.profile, self.store, **options)  # type: ignore[arg-type]

    def engine_file(self, graph: str) -> Path:
        """The engine of a graph; there is one."""
        (file,) = (self.store / "engines").glob(f"{graph}.*.onnx")
        return file


def write_profile(file: Path, **changes: str) -> Path:
    """The shipped `cpu` profile on one thread, with some lines changed: `write_profile(f, weights='"baked"')`."""
    lines = (PROFILES / "cpu.toml").read_text().splitlines()
    for key, text in {"threads": "1", **changes}.items():
        lines = [f"{key} = {text}" if line.startswith(f"{key} =") else line for line in lines]
    file.write_text("\n".join(lines))
    return file


def use_small_graphs(patch: pytest.MonkeyPatch) -> None:
    """Makes the build see the small checkpoint and its graphs."""
    patch.setattr(building, "Checkpoint", small_checkpoint.SmallCheckpoint)
    patch.setattr(building, "t2va_graphs", small_checkpoint.graphs)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished workshop, kept aside; its files name the directory that `workshop` restores it to."""
    root = tmp_path_factory.mktemp("workshop")
    workshop = Workshop(root)
    small_checkpoint.write(workshop.checkpoint, seed=1)
    both = '["fl2va", "ref2va"]'
    write_profile(workshop.profile, partitions=both)
    write_profile(workshop.baked_profile, partitions=both, weights='"baked"')
    with pytest.MonkeyPatch.context() as patch:
        use_small_graphs(patch)
        workshop.build()
    shutil.copytree(root, root.with_name("pristine"))
    return root


@pytest.fixture
def workshop(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """The finished workshop, for a test to change as it likes."""
    shutil.rmtree(pristine)
    shutil.copytree(pristine.with_name("pristine"), pristine)
    use_small_graphs(monkeypatch)
    return Workshop(pristine)
