"""The toy's h3_prepare: PARAMS as they came, unless they ask for a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from runtime.request import RequestError
from triton_repo import adapter


class TritonPythonModel(adapter.UnaryModel):
    def open(self, store: Path) -> None:
        """The toy has no store."""

    def run(self, request: Any) -> list[pb_utils.Tensor]:
        params = json.loads(adapter.read_bytes(request, "PARAMS"))
        if "refuse" in params:
            raise RequestError("refuse", params["refuse"], "must not be given")
        return [adapter.write_bytes("RESOLVED", json.dumps({**params, "outputs": 1}))]
