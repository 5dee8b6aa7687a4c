"""Attention to video tiles as it is added to diffusers' transformer, against the same in float64."""

from __future__ import annotations

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel

from h3trt.reference_attention import Clip, add_gates, attend_to_tiles
from plugins.distilled import VideoSparse
from runtime.packing import layout
from tests.video_sparse import TileProcessor, kept_of, tiles_of

GRID, AUDIO, TEXT = (9, 5, 6), 9, 70
CONFIG = {"num_attention_heads": 2, "attention_head_dim": 128, "hidden_size": 80, "num_layers": 2, "ffn_dim": 112}
CONFIG |= {"num_refiner_layers": 1, "text_dim": 48, "time_embed_hidden_dim": 72, "time_embed_dim": 40}


@pytest.mark.parametrize("tenths", [5, 8, 9])
def test_blocks_attend_to_the_tiles_of_the_clip(tenths: int) -> None:
    frames, rows, columns = GRID
    sequence = layout(torch.ones(TEXT, dtype=torch.int64), (), frames, 2 * rows, 2 * columns, AUDIO)
    torch.manual_seed(1)
    model = MiniMaxH3Transformer3DModel(**CONFIG).eval()
    add_gates(model)
    model.requires_grad_(False)
    inputs = (
        torch.randn(1, len(sequence.video_indices), 96),
        torch.randn(1, len(sequence.audio_indices), 32),
        torch.randn(1, TEXT, CONFIG["text_dim"]),
        torch.tensor([0.2, 0.4, 0.999, 1.0]),
        sequence.timestep_index,
        sequence.token_tags,
        sequence.position_ids,
    )
    indices = {f"{name}_indices": getattr(sequence, f"{name}_indices") for name in ("video", "audio", "text")}
    attend_to_tiles(model, VideoSparse(sparsity=tenths / 10), Clip(2 * AUDIO, GRID))
    found = model(*inputs, **indices)
    tiles, prefix = tiles_of(sequence.token_tags[: sequence.target_video.start].tolist(), GRID)
    for block in model.transformer_blocks:
        block.attn.processor = TileProcessor(tiles, prefix, kept_of(len(tiles) - prefix, tenths))
    exact = model(*inputs, **indices)
    # Sums of some hundred terms in float32.
    for name in ("sample", "audio_sample"):
        assert (found[name] - exact[name]).abs().max() < 1e-5 * exact[name].abs().max()
