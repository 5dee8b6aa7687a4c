"""From RGB to the planes that H.264 takes: 4:2:0, limited range, in integers that every device computes alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from runtime.contract import Colour

# Sums stay below 2^24, so that float32 holds each of them exactly, in any order and with or without fused products.
_SHIFT = 16
_ROUNDED_HALF = 0.5

# A band of rows whose float32 planes stay in a core's cache; an accelerator takes a frame whole.
_BAND_ROWS = 128


@dataclass(frozen=True)
class Matrix:
    """Luma weights of red and blue; green has the rest."""

    red: float
    blue: float

    @property
    def luma(self) -> tuple[int, int, int]:
        """Weights of R, G and B, 2^-16 levels each: 219 levels for the whole range, to the unit."""
        whole, red, blue = (round(part * 219 / 255 * 2**_SHIFT) for part in (1, self.red, self.blue))
        return red, whole - red - blue, blue

    @property
    def chroma(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The same of Cb and of Cr, over sums of eight samples; each adds up to zero, so that grey stays grey."""
        unit = 2 ** (_SHIFT - 3) * 112 / 255
        whole = round(unit)
        from_red, from_blue = round(-unit * self.red / (1 - self.blue)), round(-unit * self.blue / (1 - self.red))
        return (from_red, -whole - from_red, whole), (whole, -whole - from_blue, from_blue)


MATRICES: Mapping[Colour, Matrix] = {"bt709": Matrix(0.2126, 0.0722), "bt601_untagged": Matrix(0.299, 0.114)}


def to_i420(levels: torch.Tensor, colour: Colour) -> torch.Tensor:
    """RGB levels [3, n, H, W], whole numbers 0..255 in float32 or uint8, H and W even, to uint8 planes [n, 3H/2, W].

    The rows of a frame are Y, then the halved rows of Cb and Cr packed into W columns: ffmpeg's yuv420p. Chroma samples
    lie on the even columns, halfway between two rows, as H.264 assumes (chroma_loc_type 0): weights 1 2 1 across and
    1 1 down, the picture's left edge repeated. The result is the float64 formula of the standard, rounded, up to one
    level where that lies within 0.05 of a half; the same on every device, to the bit.
    """
    _, count, height, width = levels.shape
    planes = torch.empty(count, 3 * height // 2, width, dtype=torch.uint8, device=levels.device)
    band = _BAND_ROWS if levels.device.type == "cpu" else height
    for frame in range(count):
        luma, chroma = planes[frame, :height], planes[frame, height:].view(2, height // 2, width // 2)
        for top in range(0, height, band):
            rgb = levels[:, frame, top : top + band].to(torch.float32)
            luma[top : top + band] = _weighted(rgb, MATRICES[colour].luma, 16)
            halved = _halved(rgb)
            for plane, weights in zip(chroma, MATRICES[colour].chroma, strict=True):
                plane[top // 2 : (top + band) // 2] = _weighted(halved, weights, 128)
    return planes


def _weighted(samples: torch.Tensor, weights: tuple[int, int, int], zero: int) -> torch.Tensor:
    """Levels [h, w] of three weighted planes [3, h, w], rounded half up; float32."""
    total = samples[0] * weights[0]
    for plane, weight in zip(samples[1:], weights[1:], strict=True):
        total.add_(plane, alpha=weight)
    return total.add_((zero + _ROUNDED_HALF) * 2**_SHIFT).mul_(2.0**-_SHIFT).floor_()


def _halved(rgb: torch.Tensor) -> torch.Tensor:
    """Planes [3, h, w] to sums of eight weighted samples [3, h / 2, w / 2]."""
    pairs = rgb[:, 0::2] + rgb[:, 1::2]
    centre, right = pairs[..., 0::2], pairs[..., 1::2]
    total = torch.add(right, centre, alpha=2)
    total[..., 1:] += right[..., :-1]
    total[..., 0] += centre[..., 0]
    return total
