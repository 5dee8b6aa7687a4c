"""The peer: diffusers' transformer block at released dimensions, compiled by torch with cuDNN's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.synthetic import DEVICE, WEIGHT_DEVIATION
from plugins.dimensions import TIMESTEP_SLOTS, DenoiserDimensions

ATTENTION = "_native_cudnn"
"""diffusers' name of the attention that is fastest for it on Hopper."""


def block(dimensions: DenoiserDimensions, rows: int, compiled: bool, seed: int = 0) -> Callable[[], torch.Tensor]:
    """A call of the block on random rows, in bfloat16. It projects its AdaLN parameters itself, as upstream does."""
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerBlock

    generator = torch.Generator(DEVICE).manual_seed(seed)
    with torch.device("meta"):
        module: Any = MiniMaxH3TransformerBlock(
            hidden_size=dimensions.hidden,
            num_attention_heads=dimensions.heads,
            attention_head_dim=dimensions.head_dim,
            ffn_dim=dimensions.ffn,
            time_embed_dim=dimensions.time_dim,
            norm_eps=dimensions.norm_eps,
            qk_norm_eps=dimensions.qk_norm_eps,
        )
    module = module.to(torch.bfloat16).to_empty(device=DEVICE).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0, WEIGHT_DEVIATION, generator=generator)
    module.attn.processor._attention_backend = _attention()
    hidden = torch.randn(1, rows, dimensions.hidden, dtype=torch.bfloat16, device=DEVICE, generator=generator)
    temb = torch.randn(TIMESTEP_SLOTS, dimensions.time_dim, device=DEVICE, generator=generator)
    index = torch.randint(3 * TIMESTEP_SLOTS, (rows,), device=DEVICE, generator=generator)
    angles = torch.randn(rows, 6 * dimensions.rope_frequencies, device=DEVICE, generator=generator)
    call = torch.compile(module, dynamic=False) if compiled else module
    rotary = angles.cos(), angles.sin()

    def run() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = call(hidden, temb, index, rotary)
        return result

    return run


def _attention() -> Any:
    from diffusers.models.attention_dispatch import AttentionBackendName

    return AttentionBackendName(ATTENTION)
