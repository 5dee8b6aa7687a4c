"""What a tier of quality means for one request, forward by forward; imports no torch, so that it loads at once."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engines.quality import Linears, Tier
from plugins.block_attention import WHOLE, BlockAttention


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Attending(_Record):
    """Consecutive forwards whose blocks attend alike."""

    forwards: int
    attention: BlockAttention
    skip_threshold: float = Field(description="tiles that weigh less are left out; 0: none")

    def __str__(self) -> str:
        left_out = f" below {self.skip_threshold:g}" if self.skip_threshold else ""
        return f"{self.forwards} {self.attention}{left_out}"


class Quality(_Record):
    """The tier of a request, and what that is: nothing else than this differs from a lossless request."""

    tier: str
    linears: Linears = Field(description="how the denoiser's linear layers are computed")
    refiner: Literal["dense"]
    attending: tuple[Attending, ...] = Field(description="of the blocks, in the order of the forwards")

    @property
    def skips(self) -> bool:
        """Whether tiles may be left out in any forward."""
        return any(one.skip_threshold > 0 for one in self.attending)

    def forward(self, step: int) -> Attending:
        """How the blocks of one forward attend."""
        for one in self.attending:
            if step < one.forwards:
                return one
            step -= one.forwards
        raise IndexError(f"a request of {sum(one.forwards for one in self.attending)} forwards has no other")


def quality(tier: Tier, forwards: int, video_shift: float, positions: Sequence[float] | None = None) -> Quality:
    """What a tier is for a request of so many forwards; `positions` as `sigmas` takes them."""
    whole = WHOLE.get(tier.attention)
    dense = dense_forwards(sigmas(forwards, video_shift, positions), tier.skip_below) if whole else 0
    spans = [Attending(forwards=dense, attention=whole, skip_threshold=0.0)] if whole and dense else []
    if dense < forwards:
        rest = forwards - dense
        spans.append(Attending(forwards=rest, attention=tier.attention, skip_threshold=tier.skip_threshold))
    return Quality(tier=tier.name, linears=tier.linears, refiner="dense", attending=tuple(spans))


def dense_forwards(sigmas: Sequence[Fraction], skip_below: float) -> int:
    """How many of the first forwards skip nothing: those whose video sigma is above the gate.

    Both are exact, so that a sigma on the gate is never above it by a rounding (spec: contract 4.3).
    """
    return sum(sigma > _exact(skip_below) for sigma in sigmas)


def sigmas(forwards: int, shift: float, positions: Sequence[float] | None = None) -> list[Fraction]:
    """The video sigma of each forward: s u / (1 + (s - 1) u) at the pinned `positions` u, or at equally spaced ones."""
    uniform = [1 - Fraction(step, forwards) for step in range(forwards)]
    s, bases = _exact(shift), uniform if positions is None else [_exact(u) for u in positions[:forwards]]
    return [s * u / (1 + (s - 1) * u) for u in bases]


def _exact(number: float) -> Fraction:
    """The number as it is written: 0.97 is 97/100, not the nearest binary fraction."""
    return Fraction(repr(number))
