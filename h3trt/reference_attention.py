"""Attention to video tiles in diffusers' transformer, which has none: what a student is verified against.

Written from spec/model.md 8.3 and none of this project's operations, tile by tile, in the transformer's own dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb
from torch.nn.functional import scaled_dot_product_attention

from plugins.distilled import VideoSparse

SIDE = 4
"""Latent frames, rows and columns of patches of a video tile."""


@dataclass(frozen=True)
class Clip:
    """What a request generates: rows of its sound, and frames, rows and columns of its video's patches."""

    audio_rows: int
    grid: tuple[int, int, int]


def add_gates(model: Any) -> None:
    """Gives every block of diffusers' transformer the gate that a student's weights have, without its data."""
    for block in model.transformer_blocks:
        gate = torch.nn.Linear(model.config.hidden_size, block.attn.inner_dim, bias=False)
        block.attn.to_gate_compress = gate


def attend_to_tiles(model: Any, sparse: VideoSparse, clip: Clip) -> None:
    """Has the blocks of a model with gates attend to the tiles of a clip made from text, until this is called again."""
    for block in model.transformer_blocks:
        block.attn.processor = _Processor(sparse, clip)


class _Processor:
    def __init__(self, sparse: VideoSparse, clip: Clip) -> None:
        self._sparse, self._clip = sparse, clip

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows [1, S, D] to rows [1, S, D]."""
        projections = attn.to_q, attn.to_k, attn.to_v, attn.to_gate_compress
        query, key, value, gate = (layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in projections)
        query, key = (_apply_rotary_emb(x, *rotary_emb) for x in (attn.norm_q(query), attn.norm_k(key)))
        heads = (x[0].transpose(0, 1) for x in (query, key, value, gate))
        tiles = _Tiles(self._sparse, self._clip, hidden_states.shape[1])
        mixed = torch.stack([_attended(tiles, *head) for head in zip(*heads, strict=True)])
        result: torch.Tensor = attn.to_out[0](mixed.transpose(0, 1).flatten(1).unsqueeze(0))
        return result


@dataclass(frozen=True)
class _Tiles:
    """The tiles of a packed sequence of text, sound and video."""

    sparse: VideoSparse
    clip: Clip
    rows: int

    @cached_property
    def prefix(self) -> list[torch.Tensor]:
        """The rows of each tile of text, then of sound."""
        start = self.rows - math.prod(self.clip.grid)
        text, audio = torch.arange(start - self.clip.audio_rows), torch.arange(start - self.clip.audio_rows, start)
        return [*text.split(self.sparse.tile), *audio.split(self.sparse.tile)]

    @cached_property
    def video(self) -> list[torch.Tensor]:
        """The rows of each tile of the video."""
        numbers = torch.arange(self.rows - math.prod(self.clip.grid), self.rows).view(self.clip.grid)
        return [
            tile.flatten()
            for frames in numbers.split(SIDE, 0)
            for rows in frames.split(SIDE, 1)
            for tile in rows.split(SIDE, 2)
        ]

    @property
    def kept(self) -> int:
        """Video tiles that each one attends to; rounded first, as 1 - 0.9 is not a tenth."""
        return max(1, math.ceil(round((1 - self.sparse.sparsity) * len(self.video), 6)))


def _attended(
    tiles: _Tiles, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """One head: four of [S, d] to [S, d]."""
    every = [*tiles.prefix, *tiles.video]
    means = [torch.stack([x[rows].float().mean(0) for rows in every]) for x in (query, key, value)]
    scores = means[0] @ means[1].T * query.shape[-1] ** -0.5
    summary = scores.softmax(-1) @ means[2]
    result, before = torch.empty_like(query), len(tiles.prefix)
    for index, rows in enumerate(every):
        order = scores[index, before:].sort(descending=True, stable=True).indices[: tiles.kept]
        chosen = every if index < before else [*tiles.prefix, *(tiles.video[i] for i in order.tolist())]
        keys = torch.cat(chosen)
        mixed = scaled_dot_product_attention(query[None, rows], key[None, keys], value[None, keys])[0]
        result[rows] = mixed + gate[rows] * summary[index].to(query.dtype)
    return result
