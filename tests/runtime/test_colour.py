"""Planes against the formula of the standards in float64, and what they must be whatever made them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.colour import MATRICES, to_i420
from runtime.contract import COLOURS

LUMA = {"bt709": (0.2126, 0.7152, 0.0722), "bt601_untagged": (0.299, 0.587, 0.114)}
"""ITU-R BT.709-6 3.2 and BT.601-7 2.5.1."""


def noise(frames=2, height=288, width=64, seed=0):
    return torch.randint(
        0, 256, (3, frames, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def formula(rgb, colour):
    """Y [n, H, W], Cb and Cr [n, H/2, W/2] in float64, not rounded: chroma on even columns between two rows."""
    r, g, b = rgb.double().numpy() / 255
    kr, kg, kb = LUMA[colour]
    y = kr * r + kg * g + kb * b
    chroma = []
    for difference in ((b - y) / (2 * (1 - kb)), (r - y) / (2 * (1 - kr))):
        rows = (difference[:, 0::2] + difference[:, 1::2]) / 2
        left = np.concatenate([rows[..., :1], rows[..., 1:-1:2]], axis=-1)
        chroma.append(128 + 224 * (left + 2 * rows[..., 0::2] + rows[..., 1::2]) / 4)
    return 16 + 219 * y, *chroma


def unpacked(planes, height, width):
    halved = planes[:, height:].reshape(-1, 2, height // 2, width // 2)
    return planes[:, :height], halved[:, 0], halved[:, 1]


@pytest.mark.parametrize("colour", COLOURS)
def test_planes_are_the_standard_s_formula_rounded(colour):
    rgb = noise()
    found = unpacked(to_i420(rgb, colour).numpy().astype(float), 288, 64)
    for plane, exact in zip(found, formula(rgb, colour), strict=True):
        assert plane.shape == exact.shape
        # Half a level of rounding, and what three weights of 2^-16 levels may be off by.
        assert np.abs(plane - exact).max() <= 0.5 + 0.05
        assert (plane == np.floor(exact + 0.5)).mean() > 0.97


@pytest.mark.parametrize("colour", COLOURS)
def test_every_grey_is_its_level_without_colour(colour):
    greys = torch.arange(256, dtype=torch.uint8).view(1, 256, 1, 1).expand(3, 256, 2, 2)
    luma, cb, cr = unpacked(to_i420(greys, colour).numpy(), 2, 2)
    exact = 16 + 219 * np.arange(256) / 255
    assert (luma == np.floor(exact + 0.5)[:, None, None]).all()
    assert (cb == 128).all()
    assert (cr == 128).all()


@pytest.mark.parametrize("colour", COLOURS)
def test_no_colour_leaves_the_limited_range(colour):
    corners = torch.cartesian_prod(*[torch.tensor([0, 255], dtype=torch.uint8)] * 3)
    planes = to_i420(corners.t().reshape(3, 8, 1, 1).expand(3, 8, 2, 2), colour).numpy()
    luma, cb, cr = unpacked(planes, 2, 2)
    assert (luma.min(), luma.max()) == (16, 235)
    assert (min(cb.min(), cr.min()), max(cb.max(), cr.max())) == (16, 240)


def test_levels_in_float_and_in_bytes_are_the_same_planes():
    rgb = noise()
    assert torch.equal(to_i420(rgb.float(), "bt709"), to_i420(rgb, "bt709"))


def test_bands_of_rows_leave_no_seam():
    """The CPU goes band by band: what a frame gives does not depend on where it is cut."""
    rgb = noise(frames=1)
    whole = unpacked(to_i420(rgb, "bt709"), 288, 64)
    for top in (0, 32, 130):
        part = unpacked(to_i420(rgb[:, :, top : top + 128], "bt709"), 128, 64)
        assert torch.equal(part[0], whole[0][:, top : top + 128])
        assert torch.equal(part[1], whole[1][:, top // 2 : top // 2 + 64])


@pytest.mark.parametrize("colour", COLOURS)
def test_no_partial_sum_reaches_what_float32_cannot_hold(colour):
    """Then no order of summing and no fused product changes a bit: devices agree because of this."""
    matrix = MATRICES[colour]
    for weights, largest, zero in ((matrix.luma, 255, 16), *((row, 8 * 255, 128) for row in matrix.chroma)):
        offset = (zero + 0.5) * 2**16
        rising = sum(weight * largest for weight in weights if weight > 0)
        falling = sum(weight * largest for weight in weights if weight < 0)
        assert max(offset + rising, -falling) < 2**24
        assert offset + falling >= 0
