"""Random tensors whose values depend on the seed and their own name alone, not on the order of drawing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Draw:
    """A source of normal numbers for one component (`scope`)."""

    seed: int
    scope: str

    def normal(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> torch.Tensor:
        """Independent normal numbers, float32; equal arguments give equal bytes."""
        key = hashlib.sha256(f"{self.seed}/{self.scope}/{name}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
        values = generator.standard_normal(shape, dtype=np.float64) * std + mean
        return torch.from_numpy(values.astype(np.float32))
