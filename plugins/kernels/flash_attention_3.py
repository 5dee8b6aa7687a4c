"""FlashAttention-3 (arXiv 2407.08608) from a wheel that may be installed: `pip install fa3-fwd` (BSD, forward only)."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

MODULE = "fa3_fwd_interface"


@cache
def available() -> bool:
    """Whether the wheel is installed."""
    return importlib.util.find_spec(MODULE) is not None


def serves(query: torch.Tensor) -> bool:
    """Whether it is there and takes such queries: the wheel is built for bfloat16 alone."""
    return available() and query.dtype == torch.bfloat16 and query.shape[-1] <= 256


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """`softmax(scale * query @ key^T) @ value` over all rows: [B, H, S, d] each, and so the result."""
    from fa3_fwd_interface import flash_attn_func

    rows_first = (x.transpose(1, 2) for x in (query, key, value))
    result: torch.Tensor = flash_attn_func(*rows_first, softmax_scale=scale)
    return result.transpose(1, 2)
