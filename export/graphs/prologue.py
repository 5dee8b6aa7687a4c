"""Packed hidden rows: video and audio rows projected in float32, text rows as they come, in the sequence's order."""

from __future__ import annotations

import torch
from torch import nn

from export.checkpoint import Checkpoint
from export.graphs.graph import Graph, TensorSpec
from export.graphs.rows import AUDIO_ROWS, ROWS, TEXT_ROWS, VIDEO_ROWS
from plugins.dimensions import DenoiserDimensions


class Prologue(nn.Module):
    """Both patch projections and the gather into packed order (spec/model.md 2.2, step 1). Float32 projections."""

    def __init__(self, dimensions: DenoiserDimensions, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute
        self.proj_in = nn.Linear(dimensions.video_row, dimensions.hidden, dtype=torch.float32)
        self.audio_proj_in = nn.Linear(dimensions.audio_channels, dimensions.hidden, dtype=torch.float32)

    def forward(
        self, video_rows: torch.Tensor, audio_rows: torch.Tensor, text_rows: torch.Tensor, row_order: torch.Tensor
    ) -> torch.Tensor:
        """Hidden [S, D]; `row_order` [S] indexes the concatenation (text, audio, video)."""
        video = self.proj_in(video_rows).to(self.compute)
        audio = self.audio_proj_in(audio_rows).to(self.compute)
        return nn.functional.embedding(row_order, torch.cat([text_rows, audio, video]))


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `prologue` graph."""
    dimensions = checkpoint.dimensions.denoiser
    parameters = checkpoint.parameters("denoiser", partition)
    names = ("proj_in.weight", "proj_in.bias", "audio_proj_in.weight", "audio_proj_in.bias")
    graph = Graph(
        name="prologue",
        module=lambda: Prologue(dimensions, compute),
        inputs=(
            TensorSpec("video_rows", torch.float32, (VIDEO_ROWS, dimensions.video_row)),
            TensorSpec("audio_rows", torch.float32, (AUDIO_ROWS, dimensions.audio_channels)),
            TensorSpec("text_rows", compute, (TEXT_ROWS, dimensions.hidden)),
            TensorSpec("row_order", torch.int64, (ROWS,), below=(TEXT_ROWS, AUDIO_ROWS, VIDEO_ROWS)),
        ),
        outputs=(TensorSpec("hidden", compute, (ROWS, dimensions.hidden)),),
        weights=({name: parameters[name] for name in names},),
        compute=compute,
        trials=(
            {"video_rows": 1, "audio_rows": 1, "text_rows": 1, "rows": 1},
            {"video_rows": 6, "audio_rows": 4, "text_rows": 3, "rows": 13},
            {"video_rows": 25, "audio_rows": 9, "text_rows": 17, "rows": 40},
        ),
    )
    return (graph,)
