"""The text encoder: token ids to the conditioning rows, one embedding and one decoder-layer engine run per layer."""

from __future__ import annotations

import torch

from engines.sessions.engine_set import EngineSet
from plugins.dimensions import TextEncoderDimensions
from runtime.events import Cancellation, Reporter


def text_rotary(length: int, dimensions: TextEncoderDimensions) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary cos and sin, each [length, head_dim] float32, of a prompt without images.

    Without images the three position axes of Qwen3-VL's interleaved rotary embedding all count 0..length-1, so the
    sections collapse to a plain rotary embedding (spec/model.md 7.1).
    """
    half = torch.arange(0, dimensions.head_dim, 2, dtype=torch.float32) / dimensions.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), 1.0 / dimensions.rope_theta**half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class TextEncoder:
    """Runs the kept decoder layers; the result is the raw, un-normed hidden state of the last one."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._dimensions = engines.manifest.dimensions.text_encoder

    def encode(self, token_ids: torch.Tensor, report: Reporter, cancellation: Cancellation) -> torch.Tensor:
        """Conditioning [L, text_dim] on the engines' device in their compute dtype, of token ids [L] int64.

        Raises `Cancelled` between layers once `cancellation` is set.
        """
        cos, sin = (angles.to(self._engines.device) for angles in text_rotary(len(token_ids), self._dimensions))
        hidden = self._engines.run("text_encoder.embedding", {"token_ids": token_ids})["hidden"]
        layers = self._dimensions.layers
        report("encode", 0, layers)
        for layer in range(layers):
            cancellation.raise_if_cancelled(f"text encoder layer {layer + 1} of {layers}")
            inputs = {"hidden": hidden, "cos": cos, "sin": sin}
            hidden = self._engines.run("text_encoder.layer", inputs, instance=layer)["hidden_out"]
            report("encode", layer + 1, layers)
        return hidden
