"""The graphs that a profile's engines are made of."""

from __future__ import annotations

import torch

from engines.profile import Arithmetic, Partition, Profile
from export.checkpoint import Checkpoint
from export.graphs.graph import Graph
from export.graphs.t2va import Compute, t2va_graphs

COMPUTE: dict[Arithmetic, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "nvfp4": torch.bfloat16,
}
"""The dtype that a component computes in outside its quantised linears."""


def profile_graphs(checkpoint: Checkpoint, profile: Profile, partition: Partition) -> tuple[Graph, ...]:
    """Every graph of one partition, in the profile's precision, in the order in which a request meets them."""
    precision = profile.precision
    compute = Compute(COMPUTE[precision.text_encoder], COMPUTE[precision.denoiser], COMPUTE[precision.video_decoder])
    return t2va_graphs(checkpoint, partition, compute, segmented=profile.row_chunk > 0)
