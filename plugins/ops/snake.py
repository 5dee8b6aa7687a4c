"""The snake activation of the audio encoder, in one node: there are 36 of them, each of seven plain operations."""

from __future__ import annotations

import torch

from plugins.op import Op

FLOOR = 1e-9
"""Added to a frequency before it divides."""


def reference(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """`x + sin(alpha x)^2 / alpha`, a frequency for each channel (arXiv 2006.08195).

    x [B, C, L]; alpha [1, C, 1]; returns [B, C, L].
    """
    return x + (alpha + FLOOR).reciprocal() * torch.sin(alpha * x).square()


def fake(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """A result with x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


BODY = """
    floor = Constant <value_float = 1e-9> ()
    divisor = Add (alpha, floor)
    magnitude = Reciprocal (divisor)
    phase = Mul (alpha, x)
    wave = Sin (phase)
    power = Mul (wave, wave)
    bend = Mul (magnitude, power)
    result = Add (x, bend)
"""

OP = Op("snake", reference, fake, BODY)
"""float32 only: the constant of the body is."""
