"""The model that artifacts change: sizes of its transformer, and the shifts of its schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from export.checkpoint import Checkpoint
from export.checkpoint.components import denoiser
from export.checkpoint.safetensors_file import Declared

BLOCK_LINEARS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
"""Modules of every block, transformer's or refiner's, that multiply rows with a matrix; none has a bias."""


@dataclass(frozen=True)
class Base:
    """What an artifact's tensors are compared with; no checkpoint need be there."""

    config: denoiser.DenoiserConfig
    video_shift: float
    audio_shift: float

    @staticmethod
    def of(checkpoint: Checkpoint) -> Base:
        """The model of a checkpoint; its partitions have the same sizes and shifts."""
        config = denoiser.DenoiserConfig.model_validate(checkpoint.config("denoiser", checkpoint.partitions[0]))
        return Base(config, checkpoint.dimensions.video_shift, checkpoint.dimensions.audio_shift)

    @cached_property
    def parameters(self) -> Mapping[str, Declared]:
        """Every parameter of the transformer by its diffusers name."""
        return denoiser.tensors(self.config)

    @cached_property
    def gates(self) -> Mapping[str, Declared]:
        """The parameters that an artifact of sparse attention adds: a gate for each block."""
        with_gates = denoiser.tensors(self.config, gates=True)
        return {name: declared for name, declared in with_gates.items() if name not in self.parameters}

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Prefix of every block's parameters: those of the transformer, then those of the text refiner."""
        transformer = (f"transformer_blocks.{layer}" for layer in range(self.config.num_layers))
        refiner = (f"token_refiner.refiner_blocks.{layer}" for layer in range(self.config.num_refiner_layers))
        return (*transformer, *refiner)

    @cached_property
    def block_linears(self) -> tuple[str, ...]:
        """The six linear modules of every block: attention projections and feed-forward (released: 312)."""
        return tuple(f"{block}.{name}" for block in self.blocks for name in BLOCK_LINEARS)

    @cached_property
    def adaln_linears(self) -> tuple[str, ...]:
        """The modules that make AdaLN parameters: one for each transformer block, and the head's (released: 51)."""
        layers = range(self.config.num_layers)
        return (*(f"transformer_blocks.{layer}.adaln_proj.linear" for layer in layers), "norm_out.linear")


RELEASED = Base(denoiser.DenoiserConfig(), 12.0, 3.0)
"""MiniMax-H3 as it is published."""
