"""How much work a request is, stage by stage: the law by which times measured at one size stand for another.

The arithmetic of the denoiser and of the text encoder is the planner's. Amounts are comparable under one name only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plugins.dimensions import DenoiserDimensions, Dimensions, TextEncoderDimensions
from runtime.estimate import WorkStage
from runtime.request import Resolved


@dataclass(frozen=True)
class Work:
    """An amount of one kind of work: operations, rows or pixels, as the kind has it."""

    kind: str
    amount: float


def work_of(resolved: Resolved, text_rows: int, dimensions: Dimensions) -> Mapping[WorkStage, Work]:
    """The work of each stage. `text_rows`: rows of the text encoder, those of pictures that it is shown included."""
    return {
        "encode": _encoding(resolved, text_rows, dimensions.text_encoder),
        "denoise": _denoising(resolved, text_rows, dimensions.denoiser),
        "decode": _decoding(resolved),
    }


def _encoding(resolved: Resolved, text_rows: int, size: TextEncoderDimensions) -> Work:
    """Operations of the text encoder; with references, whose encoders weigh more, rows of everything encoded."""
    kinds = sorted({one.kind for one in resolved.references})
    if kinds:
        rows = text_rows + resolved.condition_video_rows + resolved.condition_audio_rows
        return Work(f"encode of text, {', '.join(kinds)}", rows)
    layer = 2.0 * size.layer_products * text_rows + size.mixing(text_rows)
    return Work("encode of text", size.layers * layer)


def _denoising(resolved: Resolved, text_rows: int, size: DenoiserDimensions) -> Work:
    """Operations of the blocks in all forwards of all outputs."""
    conditions = resolved.condition_video_rows + resolved.condition_audio_rows
    rows = text_rows + conditions + resolved.video_rows + resolved.audio_rows
    block = 2.0 * size.block_products * rows + size.mixing(rows)
    runs = resolved.outputs * resolved.forwards * size.layers
    changed = f" with adapter {resolved.adapter}" if resolved.adapter else ""
    return Work(f"denoise of quality {resolved.quality.tier}{changed}", runs * block)


def _decoding(resolved: Resolved) -> Work:
    """Pixels of all outputs; the encoder's preset decides how much each is worth."""
    pixels = resolved.outputs * resolved.width * resolved.height * resolved.frames
    return Work(f"decode with preset {resolved.media.preset}", pixels)
