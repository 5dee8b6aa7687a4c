"""The weight files that a build uses: their order in the manifest, and what tells that one has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.store import Region, WeightFile, weight_file
from export.binding import Binding
from export.checkpoint.expressions import Stored
from export.checkpoint.holes import lacks_data
from export.checkpoint.safetensors_file import read_header


@dataclass(frozen=True)
class Written:
    """A weight file that a step of the build writes: the step, and the file as it will be, its path as in a manifest.

    The record of that step tells whether its content has changed, so what reads the file requires the step.
    """

    step: str
    file: WeightFile


class WeightTable:
    """Every weight file that some bindings read; `files` is in the manifest's order.

    `written` are those of them, by absolute path, that need not exist yet. They come last, in the given order: what is
    read of the others stays where it is when one is added at the end.
    """

    def __init__(self, bindings: Iterable[Binding], written: Mapping[Path, Written]) -> None:
        paths = {s.file for binding in bindings for instance in binding.instances for s in instance.values()}
        self._written = written
        order = {path: index for index, path in enumerate(written, start=1)}
        self._index = {p: index for index, p in enumerate(sorted(paths, key=lambda path: (order.get(path, 0), path)))}
        self.files: tuple[WeightFile, ...] = tuple(
            written[path].file if path in written else weight_file(path) for path in self._index
        )

    def regions(self, instance: Mapping[str, Stored]) -> dict[str, Region]:
        """Where each weight of an instance lies."""
        return {name: Region(self._index[s.file], s.offset, tuple(s.shape), s.cut) for name, s in instance.items()}

    @property
    def files_json(self) -> list[Any]:
        """The files as JSON values."""
        return [file.model_dump() for file in self.files]

    @property
    def places(self) -> list[str]:
        """The files in their order, which regions tell by index."""
        return [file.path for file in self.files]

    def made_by(self, instances: Iterable[Mapping[str, Stored]]) -> tuple[str, ...]:
        """The steps that must have been done before those instances can be read."""
        return tuple(sorted({self._written[path].step for path in _paths(instances) if path in self._written}))

    def identities(self, instances: Iterable[Mapping[str, Stored]]) -> list[Any]:
        """What tells, without reading any data, that those instances have the weights that they had before."""
        return [self._identity(path) for path in sorted(_paths(instances))]

    def contents(self, instances: Iterable[Mapping[str, Stored]]) -> list[Any]:
        """What is the same wherever the files lie: hashes of headers, which of them lack data, and samples of it."""
        paths = _paths(instances)
        return sorted(
            [self.files[self._index[p]].header_sha256]
            + ([] if p in self._written else [lacks_data(p), read_header(p).sample()])
            for p in paths
        )

    def _identity(self, path: Path) -> list[Any]:
        file = self.files[self._index[path]].model_dump()
        return [file] if path in self._written else [file, path.stat().st_mtime_ns]


def _paths(instances: Iterable[Mapping[str, Stored]]) -> set[Path]:
    return {stored.file for instance in instances for stored in instance.values()}
