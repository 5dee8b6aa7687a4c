"""h3_prepare: checks a request, makes every choice it leaves open, and tokenises its prompt. Runs no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from runtime.intake import Intake
from triton_repo import adapter


class TritonPythonModel(adapter.UnaryModel):
    """PROMPT, PARAMS -> RESOLVED, TOKENS [L] int64."""

    def open(self, store: Path) -> None:
        """Read the store's manifest and tokenizer."""
        self.intake = Intake.open(store)

    def run(self, request: Any) -> list[pb_utils.Tensor]:
        """Refuses with the request contract's own text."""
        resolved = self.intake.resolve(*adapter.read_request(request))
        tokens = self.intake.tokenize(resolved)
        return [adapter.write_bytes("RESOLVED", resolved.model_dump_json()), pb_utils.Tensor("TOKENS", tokens)]
