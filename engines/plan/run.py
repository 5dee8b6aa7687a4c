"""What one graph's runs take, and a model's weights on one profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engines.plan.weights import GraphWeights, Model
from engines.profile import Arithmetic, Profile, component_of
from export.checkpoint.outline import Outline

LIBRARY_WORKSPACE = 10 << 20
"""Scratch that some matrix products take, whatever the rows: 8 to 10 MB in the builder's figures."""


@dataclass(frozen=True)
class Weighing:
    """A model's weights on one profile."""

    profile: Profile
    model: Model

    @property
    def outline(self) -> Outline:
        """The model's sizes."""
        return self.model.outline

    @property
    def weights(self) -> Mapping[str, GraphWeights]:
        """What the model's graphs are bound to."""
        return self.model.weights

    def arithmetic(self, graph: str) -> Arithmetic:
        """How a graph's matrix products are computed, where it does not pin them."""
        precision = self.profile.precision
        vision: Arithmetic = "float32" if precision.text_encoder == "float32" else "bfloat16"
        pinned: dict[str, Arithmetic] = dict.fromkeys(
            ("audio_decoder", "audio_encoder", "video_encoder_tile"), "float32"
        )
        pinned |= {"text_encoder": precision.text_encoder, "vision_encoder": vision}
        pinned |= {"video_decoder_tile": precision.video_decoder}
        return pinned.get(graph.partition(".")[0], precision.denoiser)

    def instances(self, graph: str) -> tuple[int, ...]:
        """Bytes of each instance's weights on one rank."""
        ranks = self.profile.ranks.text_encoder if component_of(graph) == "text_encoder" else 1
        return self.weights[graph].nbytes(self.arithmetic(graph), ranks)


@dataclass(frozen=True)
class Run:
    """What one graph's runs take besides its weights, on one rank. Bytes and operations a request."""

    runs: int
    activations: float
    flops: dict[Arithmetic, float]
    arrays: float
    """Written or read once in device memory: inputs, outputs and what the graph keeps."""
    io: float
    workspace: int = 0
    attention: float = 0
    collectives: float = 0
    exchanged: float = 0


def operations(
    arithmetic: Arithmetic, linear: float, attention: float, mixed: Arithmetic | None = None
) -> dict[Arithmetic, float]:
    """Operations by arithmetic of matrix products and of attention.

    Attention is not quantised with the linears, but by a choice of its own: `mixed`.
    """
    mixing: Arithmetic = mixed or (arithmetic if arithmetic.startswith("float") else "bfloat16")
    found: dict[Arithmetic, float] = {arithmetic: linear}
    found[mixing] = found.get(mixing, 0.0) + attention
    return {name: count for name, count in found.items() if count}
