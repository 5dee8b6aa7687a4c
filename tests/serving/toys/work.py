"""A unary stage of the toy: PARAMS -> RESOLVED and MP4 (both the same), after `units` pauses of `pause` seconds.

Writes when it worked, so that a test can see who worked at the same time.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from triton_repo import adapter


class TritonPythonModel(adapter.UnaryModel):
    def open(self, store: Path) -> None:
        self.store = store
        if (store / "broken").exists():
            raise RuntimeError("the toy is broken; to mend it, run: make toy")

    def run(self, request: Any, work: adapter.Work) -> list[pb_utils.Tensor]:
        text = adapter.read_bytes(request, "PARAMS")
        params = json.loads(text)
        started = time.monotonic()
        for _ in range(params.get("units", 0)):
            time.sleep(params["pause"])
        with (self.store / "spans").open("a") as file:
            file.write(f"{started} {time.monotonic()}\n")
        if "crash" in params:
            raise KeyError("/secret/path")
        return [adapter.write_bytes("RESOLVED", text), adapter.write_bytes("MP4", text)]
