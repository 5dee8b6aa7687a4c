"""Attention of the further tiers as their papers say it, in float64, and diffusers' transformer made to attend so.

Nothing here is taken from the product but the sizes of blocks and tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from plugins.kernels.hopper_attention import BFLOAT16, QUERY_TILE, SAGE

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From query, key and value [heads, S, head_dim] float64 to mixed values of that shape."""

E4M3_MAX, AMAX_FLOOR, WEIGHT_SCALE = 448.0, 1e-3, 256.0
"""SAGE's numbers (spec: contract 4.2)."""

_DISPATCH = "diffusers.models.transformers.transformer_minimax_h3.dispatch_attention_fn"


def skipping(threshold: float) -> Attend:
    """BLASST (arXiv 2512.12087), a running softmax: tiles of keys in order, left out if all rows say so."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tiles = query.split(QUERY_TILE, dim=1)
        return torch.cat([_running(tile, key, value, threshold, BFLOAT16.keys) for tile in tiles], dim=1)

    return attend


def sage(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """SAGE attention: a scale for each query, for each block of smoothed keys and for each channel of values."""
    fine = _rounded(query, query.abs().amax(-1, keepdim=True))
    smooth = key - key.mean(1, keepdim=True)
    blocks = [_rounded(block, block.abs().amax((1, 2), keepdim=True)) for block in smooth.split(SAGE.keys, dim=1)]
    scores = fine @ torch.cat(blocks, dim=1).mT * query.shape[-1] ** -0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    coarse = (weights * WEIGHT_SCALE).float().to(torch.float8_e4m3fn).double() / WEIGHT_SCALE
    return coarse @ _rounded(value, value.abs().amax(1, keepdim=True)) / weights.sum(-1, keepdim=True)


@contextmanager
def attending(forwards: Sequence[Attend | None], layers: int, text_rows: int) -> Iterator[None]:
    """Within it, the blocks of diffusers' transformer attend in each forward as that says; None: as diffusers does.

    The refiner, whose sequences are the `text_rows` alone, always attends as diffusers does.
    """
    from diffusers.models.transformers import transformer_minimax_h3

    original, calls = transformer_minimax_h3.dispatch_attention_fn, 0

    def dispatch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
        nonlocal calls
        if query.shape[1] == text_rows:
            return original(query, key, value, **options)
        attend, calls = forwards[calls // layers], calls + 1
        if attend is None:
            return original(query, key, value, **options)
        heads = (x[0].transpose(0, 1).double() for x in (query, key, value))
        return attend(*heads).transpose(0, 1).unsqueeze(0).to(query.dtype)

    with mock.patch(_DISPATCH, dispatch):
        yield
    assert calls == len(forwards) * layers, "every block of every forward attends once"


def _running(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, threshold: float, key_tile: int
) -> torch.Tensor:
    """One tile of queries [heads, rows, d] over the tiles of keys."""
    largest = query.new_full((*query.shape[:2], 1), -torch.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(query)
    for keys, values in zip(key.split(key_tile, dim=1), value.split(key_tile, dim=1), strict=True):
        scores = query @ keys.mT * query.shape[-1] ** -0.5
        tile_largest = scores.amax(-1, keepdim=True)
        kept = (torch.exp(tile_largest - largest) >= threshold).any(1, keepdim=True)
        new = torch.where(kept, torch.maximum(largest, tile_largest), largest)
        weights = torch.where(kept, torch.exp(scores - new), 0)
        shrink = torch.exp(largest - new)
        total, mixed = total * shrink + weights.sum(-1, keepdim=True), mixed * shrink + weights @ values
        largest = new
    return mixed / total


def _rounded(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """x rounded to E4M3 under scales that map `amax` to its largest value."""
    scale = amax.clamp_min(AMAX_FLOOR) / E4M3_MAX
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale
