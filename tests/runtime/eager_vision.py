"""Stands for an engine set that has the vision tower and the text encoder: transformers' own modules, one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from plugins.dimensions import Dimensions


class EagerEncoder:
    """Runs the encoder's graphs, by their names, as the modules of a transformers Qwen3-VL model."""

    device = torch.device("cpu")

    def __init__(self, model: Any, dimensions: Dimensions) -> None:
        self.manifest = SimpleNamespace(dimensions=dimensions, graphs=("text_encoder.layer",))
        self._visual, self._language = model.model.visual, model.model.language_model

    def run(self, graph: str, inputs: dict[str, torch.Tensor], instance: int = 0) -> dict[str, torch.Tensor]:
        """As EngineSet.run."""
        component, part = graph.split(".")
        with torch.no_grad():
            return getattr(self, f"_{component}_{part}")(instance, **inputs)

    def _vision_encoder_embed(
        self, instance: int, patches: torch.Tensor, position_indices: torch.Tensor, position_weights: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        positions = (self._visual.pos_embed(position_indices) * position_weights.unsqueeze(-1)).sum(0)
        return {"hidden": self._visual.patch_embed(patches) + positions}

    def _vision_encoder_block(
        self, instance: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        all_rows = torch.tensor([0, len(hidden)])
        block = self._visual.blocks[instance]
        return {"hidden_out": block(hidden, cu_seqlens=all_rows, position_embeddings=(cos, sin))}

    def _vision_encoder_merger(self, instance: int, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"rows": self._visual.merger(hidden)}

    def _vision_encoder_deepstack(self, instance: int, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"rows": self._visual.deepstack_merger_list[instance](hidden)}

    def _text_encoder_embedding(self, instance: int, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": self._language.embed_tokens(token_ids)}

    def _text_encoder_layer(
        self, instance: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        layer = self._language.layers[instance]
        causal = torch.full((1, 1, len(hidden), len(hidden)), float("-inf")).triu(1)
        out = layer(hidden[None], attention_mask=causal, position_embeddings=(cos[None], sin[None]))
        return {"hidden_out": out[0]}
