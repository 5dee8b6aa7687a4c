"""Tiles of a request's rows are those of the description, whatever its tags and its grid."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import packing
from runtime.packing import Condition, Layout, layout
from runtime.video_tiles import video_tiles
from tests.video_sparse import Tiles, tiles_of

FEW = settings(max_examples=25, deadline=None)

grids = st.tuples(st.integers(1, 13), st.integers(1, 9), st.integers(1, 9))
tags = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=150)


def text_to_video(tags: list[int], grid: tuple[int, int, int], audio: int, *conditions: Condition) -> Layout:
    frames, rows, columns = grid
    return layout(torch.tensor(tags), conditions, frames, 2 * rows, 2 * columns, audio)


def listed(rows: torch.Tensor) -> Tiles:
    """Rows by tile, without the empty places, which must come last."""
    assert all(sorted(row >= 0, reverse=True) == list(row >= 0) for row in rows.numpy())
    return [row[row >= 0].tolist() for row in rows]


@FEW
@given(tags, grids, st.integers(1, 90), st.sampled_from([0.0, 0.5, 0.8, 0.9]))
def test_tiles_are_those_of_the_description(
    tags: list[int], grid: tuple[int, int, int], audio: int, sparsity: float
) -> None:
    sequence = text_to_video(tags, grid, audio)
    found = video_tiles(sequence, sparsity)
    expected, prefix = tiles_of([*tags, *[2] * (2 * audio)], grid)
    assert listed(found.rows) == expected
    kept = max(1, ceil((1 - Fraction(str(sparsity))) * (len(expected) - prefix)))
    assert found.counts.tolist() == [prefix, kept]


@FEW
@given(tags, grids, st.integers(1, 90))
def test_every_row_is_in_one_tile_and_knows_it(tags: list[int], grid: tuple[int, int, int], audio: int) -> None:
    sequence = text_to_video(tags, grid, audio)
    tiles = video_tiles(sequence, 0.9)
    assert sorted(row for tile in listed(tiles.rows) for row in tile) == list(range(sequence.rows))
    for index, tile in enumerate(listed(tiles.rows)):
        assert set(tiles.of_row[tile].tolist()) == {index}


def test_the_video_of_243_frames_of_1344x768_has_1188_tiles() -> None:
    tiles = video_tiles(text_to_video([1] * 512, (72, 24, 42), 405), 0.9)
    prefix, kept = tiles.counts.tolist()
    assert (prefix, kept, len(tiles.rows) - prefix) == (8 + 13, 119, 18 * 6 * 11)
    sizes = (tiles.rows >= 0).sum(1)
    # 42 columns are ten of four, and two.
    assert sizes[prefix:].tolist() == [64 if tile % 11 < 10 else 32 for tile in range(1188)]
    assert sizes[:prefix].tolist() == [64] * 8 + [64] * 12 + [42]


def test_a_picture_that_is_a_condition_is_of_the_prefix_and_its_tiles_end_where_it_ends() -> None:
    picture = Condition("image", "reference", 1, 8, 10)
    sequence = text_to_video([1] * 10, (3, 4, 4), 3, picture)
    tiles = video_tiles(sequence, 0.5)
    assert [len(tile) for tile in listed(tiles.rows)] == [10, 20, 6, 48]
    assert tiles.counts.tolist() == [3, 1]


def test_rows_behind_the_video_are_refused() -> None:
    def segment(stream: packing.Stream, count: int, target: bool = False) -> packing.Segment:
        return packing.Segment(stream, np.zeros(count, np.int64), 0, np.zeros((count, 3)), target, (1, 1, count))

    sequence = packing.assemble([segment("audio", 2, True), segment("video", 4, True), segment("text", 3)])
    with pytest.raises(ValueError, match="3 rows follow the generated video"):
        video_tiles(sequence, 0.9)
