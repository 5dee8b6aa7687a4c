"""The video encoder's group normalisation of each frame by itself, and the SiLU that always follows it, in one node."""

from __future__ import annotations

import torch

from plugins.op import Op


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """`silu(group_norm(frame))` for every frame (arXiv 1803.08494).

    x [1, C, t, h, w]; weight and bias [C]; returns x's shape. Reduced where it lies: torch's norm wants frames before
    channels, which would move every frame twice.
    """
    grouped = x.unflatten(1, (groups, -1))
    centred = grouped - grouped.mean(dim=(2, 4, 5), keepdim=True)
    variance = centred.square().mean(dim=(2, 4, 5), keepdim=True)
    normed = (centred / (variance + eps).sqrt()).flatten(1, 2)
    return torch.nn.functional.silu(normed * weight.view(-1, 1, 1, 1) + bias.view(-1, 1, 1, 1))


def fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """A result with x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# A frame's pixels become one axis, and the batch of one gives its place to the groups: [groups, C / groups, t, pixels].
BODY = """
    shape = Shape (x)
    pixels = Constant <value_ints = [0, 0, 0, -1]> ()
    flat = Reshape (x, pixels)
    count = Constant <value_int: int = @groups> ()
    first = Constant <value_ints = [0]> ()
    leading = Unsqueeze (count, first)
    others = Constant <value_ints = [-1, 0, 0]> ()
    layout = Concat <axis = 0> (leading, others)
    grouped = Reshape (flat, layout)
    within = Constant <value_ints = [1, 3]> ()
    mean = ReduceMean <keepdims = 1> (grouped, within)
    centred = Sub (grouped, mean)
    square = Mul (centred, centred)
    variance = ReduceMean <keepdims = 1> (square, within)
    epsilon = Constant <value_float: float = @eps> ()
    shifted = Add (variance, epsilon)
    deviation = Sqrt (shifted)
    normed = Div (centred, deviation)
    back = Reshape (normed, shape)
    per_channel = Constant <value_ints = [-1, 1, 1, 1]> ()
    factor = Reshape (weight, per_channel)
    offset = Reshape (bias, per_channel)
    scaled = Mul (back, factor)
    moved = Add (scaled, offset)
    gate = Sigmoid (moved)
    result = Mul (moved, gate)
"""

OP = Op("frame_norm", reference, fake, BODY)
"""float32 only: the constant of the body is."""
