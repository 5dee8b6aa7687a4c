"""Tiles and their blend against diffusers' video VAE."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.tiling import TileGrid, tile_axis
from runtime.tiling import Stitcher

SIDES = st.integers(8, 200).map(lambda n: 32 * n)


@pytest.fixture(scope="module")
def vae():
    return AutoencoderKLMiniMaxH3(
        block_out_channels=(32,) * 6,
        layers_per_block=1,
        decoder_num_layers=1,
        decoder_num_attention_heads=1,
        decoder_attention_head_dim=64,
        decoder_ffn_mult=1,
    ).eval()


@pytest.mark.parametrize("length", range(16, 4097, 16))
def test_tiles_are_those_of_diffusers(vae, length):
    axis = tile_axis(length, 256, 64, 16)
    starts, lengths, overlaps = vae._split_tiles(length, 256, 64)
    assert list(axis.starts) == starts
    assert list(axis.overlaps) == overlaps
    assert {axis.tile} == set(lengths)


def test_released_canvas_has_the_tiles_of_the_specification():
    # spec/model.md 6.4
    assert tile_axis(768, 256, 64, 16).starts == (0, 160, 336, 512)
    assert tile_axis(1344, 256, 64, 16).starts == (0, 176, 352, 528, 704, 896, 1088)
    assert TileGrid.cover(768, 1344, 256, 64, 16).count == 28


@settings(max_examples=100, deadline=None)
@given(SIDES)
def test_what_tiles_keep_covers_a_side_once(length):
    axis = tile_axis(length, 256, 64, 16)
    covered = [cell for index, start in enumerate(axis.starts) for cell in range(start, start + axis.kept(index))]
    assert covered == list(range(length))


@pytest.mark.parametrize("length", [0, -16, 250])
def test_a_side_off_the_latent_grid_is_refused(length):
    with pytest.raises(ValueError, match=f"length: {length}"):
        tile_axis(length, 256, 64, 16)


def stitched_both_ways(vae, height, width, tile, overlap, seed):
    grid = TileGrid.cover(height, width, tile, overlap, 16)
    generator = torch.Generator().manual_seed(seed)
    size = (grid.rows.tile, grid.columns.tile)
    tiles = [[torch.randn(2, 3, *size, generator=generator) for _ in grid.columns.starts] for _ in grid.rows.starts]
    theirs = vae._stitch_tiles(
        [[tile[None] for tile in row] for row in tiles], list(grid.rows.overlaps), list(grid.columns.overlaps)
    )[0]
    canvas = torch.full((2, 3, height, width), float("nan"))
    stitcher = Stitcher(grid, canvas)
    for row, column in grid.places():
        scratch = tiles[row][column].clone()
        stitcher.place(row, column, scratch)
        # An engine may reuse the memory of its output for the next tile.
        scratch.fill_(float("nan"))
    return canvas, theirs


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 24).map(lambda n: 16 * n), st.integers(1, 24).map(lambda n: 16 * n), st.integers(0, 99))
def test_small_tiles_blend_bit_equal_to_diffusers_for_any_canvas(vae, height, width, seed):
    # Tiles of 64 with overlap 16 have the geometry of 256 with 64: overlaps of up to almost a tile included.
    canvas, theirs = stitched_both_ways(vae, height, width, 64, 16, seed)
    assert torch.equal(canvas, theirs)


@pytest.mark.parametrize(("height", "width"), [(256, 256), (320, 288), (464, 512), (768, 544)])
def test_real_tiles_blend_bit_equal_to_diffusers(vae, height, width):
    canvas, theirs = stitched_both_ways(vae, height, width, 256, 64, seed=1)
    assert torch.equal(canvas, theirs)


def test_tiles_out_of_order_or_of_the_wrong_size_are_refused():
    grid = TileGrid.cover(512, 512, 256, 64, 16)
    stitcher = Stitcher(grid, torch.zeros(3, 512, 512))
    with pytest.raises(ValueError, match="out of order"):
        stitcher.place(0, 1, torch.zeros(3, 256, 256))
    with pytest.raises(ValueError, match="256 x 256"):
        Stitcher(grid, torch.zeros(3, 512, 512)).place(0, 0, torch.zeros(3, 256, 240))
    with pytest.raises(ValueError, match="512 x 512"):
        Stitcher(grid, torch.zeros(3, 512, 480))
