"""h3_encode: the prompt and the references to the rows that the denoiser is conditioned on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from runtime.estimate import WORK_STAGES
from runtime.events import Cancellation
from runtime.rehearsal import rehearsals, rehearse
from triton_repo import adapter


class TritonPythonModel(adapter.UnaryModel):
    """RESOLVED, TOKENS [L], TAGS [L], MEDIA -> TEXT [L, text], CONDITION_VIDEO [., 96], CONDITION_AUDIO [., 32]."""

    def open(self, store: Path) -> None:
        """Open the encoders' engines."""
        self.pipeline = self.open_pipeline(store, ["encode"])
        self.cache = self.pipeline.cache
        self.warm(rehearsals(self.pipeline.manifest, ["encode"]), partial(rehearse, self.pipeline))

    def run(self, request: Any, work: adapter.Work) -> list[pb_utils.Tensor]:
        """Runs the encoders; refuses files and tokens that are not the resolved request's."""
        resolved = self.pipeline.restore(adapter.read_bytes(request, "RESOLVED"))
        self.check_deadline(resolved, WORK_STAGES)
        tokens, tags = (adapter.read_array(request, name) for name in ("TOKENS", "TAGS"))
        taken = self.pipeline.retake(resolved, tokens, tags, adapter.read_elements(request, "MEDIA"))
        work.begins(self.works(taken))
        encoded = self.pipeline.encode(taken, work.progress, Cancellation(request.is_cancelled))
        return [
            adapter.write_tensor("TEXT", encoded.text),
            adapter.write_tensor("CONDITION_VIDEO", encoded.condition_video),
            adapter.write_tensor("CONDITION_AUDIO", encoded.condition_audio),
        ]
