"""h3_encode: token ids to the text embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from runtime.contract import TOKENS_MAXIMUM
from runtime.events import Cancellation
from runtime.pipeline import Pipeline
from runtime.request import RequestError
from triton_repo import adapter


class TritonPythonModel(adapter.UnaryModel):
    """TOKENS [L] int64 -> TEXT [L, text]."""

    def open(self, store: Path) -> None:
        """Open the text encoder's engines."""
        self.pipeline = Pipeline.open(store, stages=["encode"])
        self.pipeline.warm()

    def run(self, request: Any) -> list[pb_utils.Tensor]:
        """Runs the text encoder; refuses token ids outside the vocabulary."""
        tokens = torch.from_dlpack(adapter.read_tensor(request, "TOKENS"))
        self._check(tokens)
        text = self.pipeline.encode(tokens, lambda event: None, Cancellation(request.is_cancelled))
        return [adapter.write_tensor("TEXT", text)]

    def _check(self, tokens: torch.Tensor) -> None:
        vocabulary = self.pipeline.manifest.dimensions.text_encoder.vocab
        if not 1 <= tokens.numel() <= TOKENS_MAXIMUM:
            raise RequestError("TOKENS", f"{tokens.numel()} tokens", f"must be from 1 to {TOKENS_MAXIMUM} tokens")
        outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
        if outside.numel():
            raise RequestError("TOKENS", int(outside[0]), f"must be from 0 to {vocabulary - 1}")
