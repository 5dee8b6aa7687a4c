"""The anti-aliased SnakeBeta activation of the BigVGAN decoder: twofold up, x + sin^2, twofold down, in one node."""

from __future__ import annotations

import torch
from torch.nn.functional import conv1d, conv_transpose1d, pad

from plugins.op import Fast, Op

RATIO = 2
"""Factor of the inner sample rate."""

TAPS = 12
"""Length of both stored low-pass filters."""

EPSILON = 1e-9
"""Added to exp(beta) before it divides."""


def reference(
    x: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, upsampling: torch.Tensor, downsampling: torch.Tensor
) -> torch.Tensor:
    """`down(y + sin(exp(alpha) y)^2 / exp(beta))` with `y = up(x)`, all channels apart (spec/model.md 6.5).

    x [B, C, L]; alpha and beta [C]; both filters [1, 1, 12]; returns [B, C, L]. Edges repeat the outermost sample.
    Source: BigVGAN (arXiv 2206.04658), diffusers' `MiniMaxH3AudioActivation1d`.
    """
    channels = x.shape[1]
    edge, crop = TAPS // RATIO - 1, TAPS + TAPS // 2 - 3
    x = pad(x, (edge, edge), mode="replicate")
    x = RATIO * conv_transpose1d(x, upsampling.expand(channels, -1, -1), stride=RATIO, groups=channels)
    x = x[..., crop:-crop]
    wave = torch.sin(alpha.exp().unsqueeze(-1) * x)
    x = x + (beta.exp() + EPSILON).reciprocal().unsqueeze(-1) * wave.square()
    x = pad(x, (TAPS // 2 - 1, TAPS // 2), mode="replicate")
    return conv1d(x, downsampling.expand(channels, -1, -1), stride=RATIO, groups=channels)


def fake(
    x: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, upsampling: torch.Tensor, downsampling: torch.Tensor
) -> torch.Tensor:
    """A result with x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# The inner signal is held as its even and odd samples, two channels at x's own rate, so both filters are plain
# convolutions: a transposed one costs ONNX Runtime three times as much. A sample of the inner signal sees six of x:
# the even ones x[m-3..m+2] through the odd taps, the odd ones x[m-2..m+3] through the even taps; index 12 is a zero.
# On the way down its repeated edges are the even sample at the start and the odd one at the end, in both channels.
BODY = """
    zero = Constant <value_floats = [0.0]> ()
    flat_shape = Constant <value_ints = [-1]> ()
    up_flat = Reshape (upsampling, flat_shape)
    up_extended = Concat <axis = 0> (up_flat, zero)
    up_order = Constant <value = int64[2, 1, 7] {11, 9, 7, 5, 3, 1, 12, 12, 10, 8, 6, 4, 2, 0}> ()
    up_gathered = Gather <axis = 0> (up_extended, up_order)
    two = Constant <value_float = 2.0> ()
    up_taps = Mul (up_gathered, two)
    down_flat = Reshape (downsampling, flat_shape)
    down_extended = Concat <axis = 0> (down_flat, zero)
    down_order = Constant <value = int64[1, 2, 7] {12, 1, 3, 5, 7, 9, 11, 0, 2, 4, 6, 8, 10, 12}> ()
    down_taps = Gather <axis = 0> (down_extended, down_order)

    rows = Shape <start = 0, end = 2> (x)
    per_row = Constant <value_ints = [-1, 1, 1]> ()
    alpha_rows = Expand (alpha, rows)
    alpha_column = Reshape (alpha_rows, per_row)
    frequency = Exp (alpha_column)
    beta_rows = Expand (beta, rows)
    beta_column = Reshape (beta_rows, per_row)
    exp_beta = Exp (beta_column)
    tiny = Constant <value_float = 1e-9> ()
    divisor = Add (exp_beta, tiny)
    magnitude = Reciprocal (divisor)

    row_shape = Constant <value_ints = [-1, 1, 0]> ()
    flat = Reshape (x, row_shape)
    edges = Constant <value_ints = [0, 0, 3, 0, 0, 3]> ()
    padded = Pad <mode = "edge"> (flat, edges)
    inner = Conv (padded, up_taps)
    phase = Mul (frequency, inner)
    wave = Sin (phase)
    power = Mul (wave, wave)
    bend = Mul (magnitude, power)
    bent = Add (inner, bend)

    channel_and_time = Constant <value_ints = [1, 2]> ()
    start = Constant <value_ints = [0, 0]> ()
    start_end = Constant <value_ints = [1, 1]> ()
    end = Constant <value_ints = [-1, -1]> ()
    end_end = Constant <value_ints = [9223372036854775807, 9223372036854775807]> ()
    repeats = Constant <value_ints = [1, 2, 3]> ()
    first = Slice (bent, start, start_end, channel_and_time)
    head = Expand (first, repeats)
    last = Slice (bent, end, end_end, channel_and_time)
    tail = Expand (last, repeats)
    extended = Concat <axis = 2> (head, bent, tail)
    filtered = Conv (extended, down_taps)
    shape = Shape (x)
    result = Reshape (filtered, shape)
"""

# A compiler calls it: hundreds of them, each taken apart, would take minutes to compile.
OP = Op("alias_free_snake", reference, fake, BODY, fast=(Fast("cuda", reference), Fast("cpu", reference)))
