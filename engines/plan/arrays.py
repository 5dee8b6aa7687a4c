"""Activation memory: the arrays that a compiled graph holds at once, in bytes.

Measured with the TensorRT-RTX 1.7 builder at released sizes (`Total Activation Memory`; tests/plan/test_builder.py):
a graph's memory is its fullest phase, and within a phase nothing is reused, not even what the phase no longer reads.
A block's fullest phase goes from the packed projection to the mixed values: 179,652 bytes a row in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.profile import Arithmetic
from plugins.block_attention import BlockAttention, quantises, skips
from plugins.dimensions import AUDIO_CHANNELS, DenoiserDimensions, TextEncoderDimensions, VisionDimensions
from plugins.ops.nvfp4_linear import BLOCK
from plugins.video_tiles import TILE, heads_together, scratch_bytes

FLOAT = 4
"""Bytes of a float32."""

INDEX = 4
"""Bytes of an index inside a graph, where int64 inputs have become int32."""

AUDIO_ARRAYS = 11
"""Float32 arrays of the widest stage that the audio decoder holds. The builder's 360,484,864 bytes for 640 latents."""

CLIP_ARRAYS = 6.2
"""Float32 arrays of the first level that the video encoder holds. The builder's 3,512,557,568 bytes for 17 frames."""

WAVEFORM_ARRAYS = 4.2
"""Float32 arrays of the first stage that the audio encoder holds. The builder's 1,082,982,400 bytes for 16 s."""


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: of the compute dtype, of a linear's quantised operand (0: none), of its product."""

    item: float
    operand: float
    product: float

    @staticmethod
    def of(arithmetic: Arithmetic) -> Widths:
        """Quantised operands stand beside the rows that they are made of, and their products are float32."""
        quantised = {"fp8": Widths(2, 1, FLOAT), "nvfp4": Widths(2, 0.5 + 1 / BLOCK, FLOAT)}
        plain = {"float32": Widths(FLOAT, 0, FLOAT), "float16": Widths(2, 0, 2), "bfloat16": Widths(2, 0, 2)}
        return (quantised | plain)[arithmetic]

    def quantised(self, features: int) -> float:
        """A row as a quantised linear's operand, with its scale."""
        return self.operand * features + FLOAT if self.operand else 0


def projected(size: DenoiserDimensions, widths: Widths) -> float:
    """A row from the normed hidden state to queries and keys that are normed but not rotated."""
    packed = 3 * size.inner * widths.product
    normed = 2 * size.inner * FLOAT + 2 * size.heads * FLOAT
    return packed + normed


def heads(size: DenoiserDimensions, widths: Widths) -> float:
    """A row of queries, keys, values and mixed values."""
    return 4 * size.inner * widths.item


def feed_forward(size: DenoiserDimensions, widths: Widths) -> float:
    """A row from the hidden state after attention to the block's result."""
    kept = 2 * size.hidden * widths.item
    inner = 2 * size.ffn * widths.product + size.ffn * widths.item
    narrowed = size.hidden * FLOAT if widths.operand else 0
    return kept + inner + widths.quantised(size.hidden) + widths.quantised(size.ffn) + narrowed


def block(size: DenoiserDimensions, arithmetic: Arithmetic) -> float:
    """A row of the whole block: both gates are gathered at its start and kept."""
    widths = Widths.of(arithmetic)
    gates = 2 * size.hidden * widths.item + INDEX
    attention = projected(size, widths) + heads(size, widths)
    return gates + max(attention, feed_forward(size, widths))


def compiled_block(size: DenoiserDimensions, arithmetic: Arithmetic) -> float:
    """A row of the whole block as inductor runs it, in what torch's allocator then holds.

    It reuses what is freed, as long as it is large enough: the products of the feed-forward's first matrix are wider
    than anything before them, and come on top of what attention has left.
    """
    widths = Widths.of(arithmetic)
    normed = widths.quantised(size.hidden) or size.hidden * widths.item
    attention = 6 * size.inner * widths.item + size.heads * FLOAT
    return normed + attention + 2 * size.ffn * widths.item


def images(size: DenoiserDimensions, attention: BlockAttention) -> float:
    """A row of the copies that attention other than dense works on: E4M3 with a scale a query, or bfloat16."""
    if quantises(attention):
        return 3 * size.inner + FLOAT * size.heads
    return 2 * 3 * size.inner if skips(attention) else 0


def tiled(size: DenoiserDimensions, widths: Widths, tiles: int, heads: int) -> float:
    """Attention to video tiles, of some heads: queries, keys and values laid out by tiles, and what chooses the tiles.

    That is the tiles' means, their summary, and the scratch of the heads that are chosen for together.
    """
    laid = 3 * tiles * TILE * heads * size.head_dim * widths.item
    means = 4 * tiles * heads * size.head_dim * FLOAT
    return laid + means + scratch_bytes(heads_together(heads, tiles), tiles)


def project(size: DenoiserDimensions, arithmetic: Arithmetic) -> float:
    """A row of `block.project`, whose results are not its own memory."""
    widths = Widths.of(arithmetic)
    normed = size.hidden * (FLOAT + widths.item) + FLOAT
    return max(normed, projected(size, widths))


def attend(size: DenoiserDimensions, arithmetic: Arithmetic) -> float:
    """A row of `block.attend`: the builder copies its inputs and its result into the kernel's order."""
    return heads(size, Widths.of(arithmetic))


def finish(size: DenoiserDimensions, arithmetic: Arithmetic) -> float:
    """A row of `block.finish`."""
    widths = Widths.of(arithmetic)
    summed = size.hidden * FLOAT if widths.operand else 0
    attention = widths.quantised(size.inner) + summed + 2 * size.hidden * widths.item
    return max(attention, feed_forward(size, widths))


def context(size: DenoiserDimensions, arithmetic: Arithmetic) -> float:
    """A row of the refiner."""
    widths = Widths.of(arithmetic)
    attention = projected(size, widths) + heads(size, widths)
    return size.hidden * widths.item + max(attention, feed_forward(size, widths))


def epilogue(size: DenoiserDimensions) -> float:
    """A row of the head: normed in float32, and both velocities."""
    return FLOAT * (size.hidden + size.video_row + size.audio_channels)


def text_layer(size: TextEncoderDimensions, arithmetic: Arithmetic, ranks: int) -> float:
    """A row of a decoder layer on one of its tensor parallel ranks."""
    widths = Widths.of(arithmetic)
    queries, keys = size.heads * size.head_dim / ranks, size.kv_heads * size.head_dim / ranks
    normed = (queries + keys) * (FLOAT + 2 * widths.item)
    attention = normed + (queries + 2 * keys) * widths.product
    inner = size.intermediate / ranks
    mlp = 2 * inner * widths.product + inner * widths.item + widths.quantised(round(inner))
    # A rank's part of a sum over the ranks, and the sum.
    summed = 2 * size.hidden * FLOAT if ranks > 1 else 0
    return 2 * size.hidden * widths.item + widths.quantised(size.hidden) + summed + max(attention, mlp)


def tile(tokens: int, width: int, inner: int, item: int) -> int:
    """A video decoder tile: the float32 residual, the feed-forward, and its first matrix cast from float32."""
    cast = 2 * inner * width * item if item < FLOAT else 0
    return tokens * (width * (FLOAT + item) + 3 * inner * item) + cast


def audio(widest: int) -> int:
    """A latent in the audio decoder; `widest`: channels times samples of its widest stage."""
    return AUDIO_ARRAYS * AUDIO_CHANNELS * widest * FLOAT


def vision(size: VisionDimensions, item: float) -> float:
    """A patch in a block of the vision encoder, fullest in its feed-forward: 15,520 bytes in bfloat16."""
    return (3 * size.hidden + size.intermediate) * item


def clip(pixels: int, channels: int) -> float:
    """A tile in the video encoder, of so many pixels in all frames, at its widest: before it is halved."""
    return CLIP_ARRAYS * pixels * channels * FLOAT


def waveform(samples: int, channels: int) -> float:
    """Both channels of a sound in the audio encoder."""
    return WAVEFORM_ARRAYS * AUDIO_CHANNELS * samples * channels * FLOAT
