"""h3_decode: latents to frames and sound to MP4. Frames go to the encoder chunk by chunk and never leave this model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from runtime.events import Cancellation
from runtime.rehearsal import rehearsals, rehearse
from runtime.request import Resolved
from runtime.work import work_of
from triton_repo import adapter


class TritonPythonModel(adapter.UnaryModel):
    """RESOLVED, VIDEO [n, 24, T, h, w], AUDIO [n, 2, 32, A], float32 -> MP4 [n]."""

    def open(self, store: Path) -> None:
        """Open the decoders' engines."""
        self.pipeline = self.open_pipeline(store, ["decode"])
        self.warm(rehearsals(self.pipeline.manifest, ["decode"]), partial(rehearse, self.pipeline))

    def run(self, request: Any, work: adapter.Work) -> list[pb_utils.Tensor]:
        """Decodes and encodes each output; refuses latents whose shape is not the request's."""
        resolved = self.pipeline.restore(adapter.read_bytes(request, "RESOLVED"))
        video, audio = (torch.from_dlpack(adapter.read_tensor(request, name)) for name in ("VIDEO", "AUDIO"))
        self._check(resolved, video, audio)
        work.begins(work_of(resolved, 1, self.pipeline.manifest.dimensions))
        cancellation = Cancellation(request.is_cancelled)
        clips = [
            self.pipeline.decode(resolved, video[i : i + 1], audio[i : i + 1], work.progress, cancellation)
            for i in range(resolved.outputs)
        ]
        for clip in clips:
            work.made(clip, resolved.seconds)
        return [adapter.write_bytes("MP4", *clips)]

    def _check(self, resolved: Resolved, video: torch.Tensor, audio: torch.Tensor) -> None:
        grid = (resolved.latent_frames, resolved.latent_height, resolved.latent_width)
        adapter.check_shape("VIDEO", video.shape, (resolved.outputs, video.shape[1], *grid))
        adapter.check_shape("AUDIO", audio.shape, (resolved.outputs, *audio.shape[1:3], resolved.audio_latents))
