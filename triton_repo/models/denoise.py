"""h3_denoise: the sampling loop, from the encoded conditions to the latents of picture and sound of each output."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from runtime.events import Cancellation
from runtime.pipeline import Encoded
from runtime.rehearsal import rehearsals, rehearse
from runtime.work import work_of
from triton_repo import adapter


class TritonPythonModel(adapter.UnaryModel):
    """RESOLVED, TEXT, TAGS, CONDITION_VIDEO, CONDITION_AUDIO -> VIDEO [n, 24, T, h, w] and AUDIO [n, 2, 32, A]."""

    def open(self, store: Path) -> None:
        """Open the denoiser's engines."""
        self.pipeline = self.open_pipeline(store, ["denoise"])
        self.warm(rehearsals(self.pipeline.manifest, ["denoise"]), partial(rehearse, self.pipeline))

    def run(self, request: Any, work: adapter.Work) -> list[pb_utils.Tensor]:
        """Runs all forwards of every output; a cancelled request stops before the next one."""
        resolved = self.pipeline.restore(adapter.read_bytes(request, "RESOLVED"))
        self.check_deadline(resolved, ("denoise", "decode"))
        names = ("TEXT", "TAGS", "CONDITION_VIDEO", "CONDITION_AUDIO")
        encoded = Encoded(*(torch.from_dlpack(adapter.read_tensor(request, name)) for name in names))
        work.begins(work_of(resolved, len(encoded.text), self.pipeline.manifest.dimensions))
        cancellation = Cancellation(request.is_cancelled)
        made = list(self.pipeline.denoise(resolved, encoded, work.progress, cancellation))
        video, audio = (torch.cat(latents) for latents in zip(*made, strict=True))
        return [adapter.write_tensor("VIDEO", video), adapter.write_tensor("AUDIO", audio)]
