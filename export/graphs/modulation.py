"""The modulation tables of a schedule: the time embedding, and the AdaLN projection of every block and of the head.

They depend on the timesteps alone, so they run once a schedule and their 13 B parameters leave the denoising loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from export.checkpoint import Checkpoint
from export.checkpoint.expressions import Weight
from export.graphs.graph import Axis, Graph, TensorSpec
from plugins.dimensions import TIMESTEP_SLOTS, DenoiserDimensions

MAX_PERIOD = 10_000
"""Longest period of the sinusoidal timestep embedding."""


class TimeEmbedding(nn.Module):
    """Sinusoids of unscaled timesteps and their MLP in float32, silu before the one cast (spec/model.md 2.2, 10.1)."""

    def __init__(self, dimensions: DenoiserDimensions, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute
        self.frequencies = dimensions.freq_dim // 2
        self.linear_1 = nn.Linear(dimensions.freq_dim, dimensions.time_hidden, dtype=torch.float32)
        self.linear_2 = nn.Linear(dimensions.time_hidden, dimensions.time_dim, dtype=torch.float32)

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Timesteps [M] in [0, 1] to embeddings [M, time_dim]."""
        exponents = torch.arange(self.frequencies, dtype=torch.float32, device=timesteps.device)
        angles = timesteps.unsqueeze(-1) * torch.exp(exponents * (-math.log(MAX_PERIOD) / self.frequencies))
        sinusoids = torch.cat([angles.cos(), angles.sin()], dim=-1)
        hidden = self.linear_2(nn.functional.silu(self.linear_1(sinusoids)))
        return nn.functional.silu(hidden).to(self.compute)


class AdaLayerNormProjection(nn.Module):
    """One AdaLN projection of the time embedding."""

    def __init__(self, inputs: int, outputs: int, compute: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, dtype=compute)

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        """Embeddings [M, time_dim] to modulation [M, features]; a block's features are (modality, chunk, channel)."""
        return self.linear(embedding)


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `modulation.time` and `modulation.adaln` graphs; the latter's last instance is the head's projection."""
    dimensions = checkpoint.dimensions.denoiser
    parameters = checkpoint.parameters("denoiser", partition)
    return _time(dimensions, parameters, compute), _adaln(dimensions, parameters, compute)


def _time(dimensions: DenoiserDimensions, parameters: Mapping[str, Weight], compute: torch.dtype) -> Graph:
    names = ("linear_1.weight", "linear_1.bias", "linear_2.weight", "linear_2.bias")
    return Graph(
        name="modulation.time",
        module=lambda: TimeEmbedding(dimensions, compute),
        inputs=(TensorSpec("timesteps", torch.float32, (TIMESTEP_SLOTS,)),),
        outputs=(TensorSpec("embedding", compute, (TIMESTEP_SLOTS, dimensions.time_dim)),),
        weights=({name: parameters[f"time_embedder.{name}"] for name in names},),
        compute=compute,
        trials=({},),
    )


def _adaln(dimensions: DenoiserDimensions, parameters: Mapping[str, Weight], compute: torch.dtype) -> Graph:
    prefixes = [f"transformer_blocks.{i}.adaln_proj" for i in range(dimensions.layers)] + ["norm_out"]
    features = Axis("features", 2 * dimensions.hidden, dimensions.adaln_features)
    return Graph(
        name="modulation.adaln",
        module=lambda: AdaLayerNormProjection(dimensions.time_dim, dimensions.adaln_features, compute),
        inputs=(TensorSpec("embedding", compute, (TIMESTEP_SLOTS, dimensions.time_dim)),),
        outputs=(TensorSpec("modulation", compute, (TIMESTEP_SLOTS, features)),),
        weights=tuple({n: parameters[f"{p}.{n}"] for n in ("linear.weight", "linear.bias")} for p in prefixes),
        compute=compute,
        trials=({},),
        weight_axes={"linear.weight": (features, dimensions.time_dim), "linear.bias": (features,)},
    )
