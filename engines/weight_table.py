"""The checkpoint's weight files that a build uses: their order in the manifest, and what tells that one has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engines.store import Region, WeightFile, weight_file
from export.binding import Binding
from export.checkpoint.expressions import Stored


class WeightTable:
    """Every weight file that some bindings read; `files` is in the manifest's order."""

    def __init__(self, bindings: Iterable[Binding]) -> None:
        paths = {s.file for binding in bindings for instance in binding.instances for s in instance.values()}
        self._index = {path: index for index, path in enumerate(sorted(paths))}
        self.files: tuple[WeightFile, ...] = tuple(weight_file(path) for path in self._index)

    def regions(self, instance: Mapping[str, Stored]) -> dict[str, Region]:
        """Where each weight of an instance lies."""
        return {name: Region(self._index[s.file], s.offset, tuple(s.shape)) for name, s in instance.items()}

    @property
    def files_json(self) -> list[Any]:
        """The files as JSON values."""
        return [file.model_dump() for file in self.files]

    def identities(self, instances: Iterable[Mapping[str, Stored]]) -> list[Any]:
        """What tells, without reading any data, that those instances have the weights that they had before."""
        paths: set[Path] = {stored.file for instance in instances for stored in instance.values()}
        return [[self.files[self._index[p]].model_dump(), p.stat().st_mtime_ns] for p in sorted(paths)]
