"""The head: modulated norm in the compute dtype, then both velocity projections in float32 over all rows."""

from __future__ import annotations

import torch
from torch import nn

from export.checkpoint import Checkpoint
from export.graphs.graph import Graph, TensorSpec
from export.graphs.rows import ROWS
from plugins.dimensions import TIMESTEP_SLOTS, DenoiserDimensions
from plugins.ops.modulated_rms_norm import OP as MODULATED_RMS_NORM


class Epilogue(nn.Module):
    """The output norm, modulated by timestep alone, and the two heads (spec/model.md 2.2, step 4)."""

    def __init__(self, dimensions: DenoiserDimensions, compute: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dimensions.hidden, eps=dimensions.final_norm_eps, dtype=compute)
        self.proj_out = nn.Linear(dimensions.hidden, dimensions.video_row, dtype=torch.float32)
        self.audio_proj_out = nn.Linear(dimensions.hidden, dimensions.audio_channels, dtype=torch.float32)
        self.eps = dimensions.final_norm_eps

    def forward(self, hidden: torch.Tensor, modulation: torch.Tensor, timestep_index: torch.Tensor) -> torch.Tensor:
        """Hidden [S, D] to velocity [S, video + audio features], float32."""
        shift, scale = modulation.chunk(2, dim=-1)
        x = MODULATED_RMS_NORM(hidden, self.norm.weight, scale, shift, timestep_index, self.eps).to(torch.float32)
        return torch.cat([self.proj_out(x), self.audio_proj_out(x)], dim=-1)


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `epilogue` graph."""
    dimensions = checkpoint.dimensions.denoiser
    parameters = checkpoint.parameters("denoiser", partition)
    heads = ("proj_out.weight", "proj_out.bias", "audio_proj_out.weight", "audio_proj_out.bias")
    graph = Graph(
        name="epilogue",
        module=lambda: Epilogue(dimensions, compute),
        inputs=(
            TensorSpec("hidden", compute, (ROWS, dimensions.hidden)),
            TensorSpec("modulation", compute, (TIMESTEP_SLOTS, 2 * dimensions.hidden)),
            TensorSpec("timestep_index", torch.int64, (ROWS,), below=TIMESTEP_SLOTS),
        ),
        outputs=(TensorSpec("velocity", torch.float32, (ROWS, dimensions.video_row + dimensions.audio_channels)),),
        weights=({"norm.weight": parameters["norm_out.norm.weight"]} | {name: parameters[name] for name in heads},),
        compute=compute,
        trials=({"rows": 1}, {"rows": 5}, {"rows": 33}),
    )
    return (graph,)
