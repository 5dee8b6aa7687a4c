"""diffusers' transformer with attention to video tiles, which diffusers does not have: from its description."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention, _apply_rotary_emb

from tests.video_sparse import Tiles, formula


class TileProcessor:
    """Queries, keys and values as diffusers makes them, mixed in float64 (spec/model.md 8.3)."""

    def __init__(self, tiles: Tiles, prefix: int, kept: int) -> None:
        self._tiles, self._prefix, self._kept = tiles, prefix, kept

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows [1, S, D] to rows [1, S, D]."""
        projections = attn.to_q, attn.to_k, attn.to_v, attn.to_gate_compress
        query, key, value, gate = (p(hidden_states).unflatten(-1, (attn.heads, -1)) for p in projections)
        query = _apply_rotary_emb(attn.norm_q(query), *rotary_emb)
        key = _apply_rotary_emb(attn.norm_k(key), *rotary_emb)
        heads = (x[0].transpose(0, 1).double().numpy() for x in (query, key, value, gate))
        mixed = formula(*heads, self._tiles, self._prefix, self._kept, attn.head_dim**-0.5)
        rows = torch.from_numpy(mixed).transpose(0, 1).flatten(1).to(hidden_states.dtype)
        result: torch.Tensor = attn.to_out[0](rows[None])
        return result
