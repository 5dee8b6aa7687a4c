"""The step that writes a file of weights into the store: a component's, quantised, or an adapter's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.declaration import source_hash
from engines.steps import Product, Record, Step, Work
from engines.store import WeightFile, weight_file
from engines.weight_table import Written
from export import low_rank, merged, schemes, sidecar
from export.artifacts import patched
from export.checkpoint.holes import lacks_data
from export.sidecar import Sidecar
from plugins.ops import fp8_linear, nvfp4_linear

WRITERS = (schemes, sidecar, fp8_linear, nvfp4_linear, low_rank, merged, patched)
"""The modules that say what the file's bytes are."""


class QuantiseStep:
    """The step for one planned file, which lies in the store at `root`."""

    def __init__(self, planned: Sidecar, root: Path, work: Work) -> None:
        self.sidecar = planned
        self._path = planned.path.relative_to(root).as_posix()
        self._name = f"quantise.{planned.path.name.rsplit('.', 2)[0]}"
        self._work = work

    @property
    def written(self) -> Written:
        """The file as it will be, whether it is there yet or not."""
        file = WeightFile(path=self._path, size=self.sidecar.size, header_sha256=self.sidecar.header_sha256)
        return Written(self._name, file)

    def step(self) -> Step:
        """Done again when a weight's file changes, or how it is quantised."""
        files = sorted({source.file for source in self.sidecar.sources()})
        depends_on = {
            "header": self.sidecar.header_sha256,
            "source": source_hash([Path(str(module.__file__)) for module in WRITERS]),
            "lacking data": [lacks_data(file) for file in files],
        }
        here = {"files": [[weight_file(file).model_dump(), file.stat().st_mtime_ns] for file in files]}
        return Step(self._name, depends_on, self._do, here=here)

    def _do(self, records: Mapping[str, Record]) -> Product:
        self.sidecar.write(self._report)
        facts: dict[str, Any] = {"scheme": self.sidecar.encoding.name, "bytes": self.sidecar.size}
        return Product(facts, {self._path: self.sidecar.path})

    def _report(self, weight: str, written: int, size: int) -> None:
        self._work.report(self._name, weight, written, size)
