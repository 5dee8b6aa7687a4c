"""h3_denoise: the sampling loop, from the text embedding to the latents of picture and sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from runtime.events import Cancellation
from runtime.pipeline import Pipeline
from runtime.request import restore
from triton_repo import adapter


class TritonPythonModel(adapter.UnaryModel):
    """RESOLVED, TEXT [L, text] -> VIDEO [1, 24, T, h, w] and AUDIO [2, 32, A], float32."""

    def open(self, store: Path) -> None:
        """Open the denoiser's engines."""
        self.pipeline = Pipeline.open(store, stages=["denoise"])
        self.pipeline.warm()

    def run(self, request: Any) -> list[pb_utils.Tensor]:
        """Runs all forwards of the request; a cancelled request stops before the next one."""
        resolved = restore(adapter.read_bytes(request, "RESOLVED"), self.pipeline.manifest.dimensions)
        text = torch.from_dlpack(adapter.read_tensor(request, "TEXT"))
        cancellation = Cancellation(request.is_cancelled)
        video, audio = self.pipeline.denoise(resolved, text, lambda event: None, cancellation)
        return [adapter.write_tensor("VIDEO", video), adapter.write_tensor("AUDIO", audio)]
