"""The step that writes the file of a component's quantised weights into the store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.steps import Product, Record, Step, Work
from engines.store import WeightFile, weight_file
from engines.weight_table import Written
from export.sidecar import Sidecar


class QuantiseStep:
    """The step for one planned file, which lies in the store at `root`."""

    def __init__(self, sidecar: Sidecar, root: Path, work: Work) -> None:
        self.sidecar = sidecar
        self._path = sidecar.path.relative_to(root).as_posix()
        self._name = f"quantise.{sidecar.path.name.rsplit('.', 2)[0]}"
        self._work = work

    @property
    def written(self) -> Written:
        """The file as it will be, whether it is there yet or not."""
        file = WeightFile(path=self._path, size=self.sidecar.size, header_sha256=self.sidecar.header_sha256)
        return Written(self._name, file)

    def step(self) -> Step:
        """Done again when a weight's file changes, or the scheme's tensors."""
        files = sorted({source.file for source in self.sidecar.sources()})
        depends_on = {
            "header": self.sidecar.header_sha256,
            "files": [[weight_file(file).model_dump(), file.stat().st_mtime_ns] for file in files],
        }
        return Step(self._name, depends_on, self._do, portable=True)

    def _do(self, records: Mapping[str, Record]) -> Product:
        self.sidecar.write(self._report)
        facts: dict[str, Any] = {"scheme": self.sidecar.scheme.name, "bytes": self.sidecar.size}
        return Product(facts, {self._path: self.sidecar.path})

    def _report(self, weight: str, written: int, size: int) -> None:
        self._work.report(self._name, weight, written, size)
