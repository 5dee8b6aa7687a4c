"""The toy's h3_prepare: PARAMS as they came, unless they ask for a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from runtime.request import RequestError
from triton_repo import adapter
from triton_repo import metric_table as table


class TritonPythonModel(adapter.UnaryModel):
    def open(self, store: Path) -> None:
        """The toy has no store; what it remembers it publishes."""
        state = self.settings.state
        self.metrics.show(table.RESTARTS, state.restarts() if state is not None else 0)

    def run(self, request: Any, work: adapter.Work) -> list[pb_utils.Tensor]:
        params = json.loads(adapter.read_bytes(request, "PARAMS"))
        if "refuse" in params:
            raise RequestError("refuse", params["refuse"], "must not be given")
        return [adapter.write_bytes("RESOLVED", json.dumps({**params, "outputs": 1}))]
