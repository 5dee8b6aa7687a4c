"""Kernels of video-sparse attention against float64, on a GPU, or, with TRITON_INTERPRET=1, as Python on a CPU."""

from __future__ import annotations

import os

import pytest
import torch

from plugins.ops.video_sparse_attention import chosen, reference, sparse
from plugins.video_tiles import TILE
from runtime.packing import Layout, layout
from runtime.video_tiles import VideoTiles, video_tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

pytestmark = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="torch finds no CUDA device on this machine, and TRITON_INTERPRET is not 1"
)
ONLY_ON_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

# A prompt with two changes of tag, sound, and a picture whose sides end with smaller tiles: 2, 1, 2, 1 and 8 tiles.
TAGS = [1] * 70 + [0] * 5 + [1] * 65
GRID, AUDIO = (5, 6, 7), 20

Heads = tuple[torch.Tensor, ...]


def sequence() -> Layout:
    frames, rows, columns = GRID
    return layout(torch.tensor(TAGS), (), frames, 2 * rows, 2 * columns, AUDIO)


def drawn(rows: int, heads: int, width: int, dtype: torch.dtype, batch: int = 1) -> Heads:
    """Queries, keys, values and gates [B, H, S, d], all of a row beside one another in memory."""
    generator = torch.Generator().manual_seed(rows + width)
    packed = torch.randn(batch, rows, heads, 4 * width, generator=generator).to(DEVICE, dtype)
    return tuple(x.transpose(1, 2) for x in packed.chunk(4, -1))


def expected(heads: Heads, tiles: VideoTiles, scale: float) -> torch.Tensor:
    return reference(*(x.double() for x in heads), tiles.rows, tiles.of_row, tiles.counts, scale)


def found(heads: Heads, tiles: VideoTiles, scale: float) -> torch.Tensor:
    return sparse(*heads, tiles.rows, tiles.of_row, tiles.counts, scale)


def off(one: torch.Tensor, exact: torch.Tensor) -> float:
    return float((one.double() - exact).norm() / exact.norm())


BOUNDS = {torch.bfloat16: 0.004, torch.float16: 0.0005, torch.float32: 2e-6}
"""Weights and results are rounded to the dtype: 2^-9 / sqrt(3) of themselves each, in the mean square, in bfloat16."""


@pytest.mark.parametrize(
    ("dtype", "width"),
    # Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers.
    [
        pytest.param(torch.bfloat16, 128, marks=ONLY_ON_GPU),
        (torch.float16, 128),
        (torch.float32, 128),
        pytest.param(torch.bfloat16, 16, marks=ONLY_ON_GPU),
    ],
)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_kernels_are_the_reference(dtype: torch.dtype, width: int, sparsity: float) -> None:
    tiles = video_tiles(sequence(), sparsity).to(DEVICE)
    heads = drawn(len(tiles.of_row), 3, width, dtype)
    result = found(heads, tiles, width**-0.5)
    assert result.stride() == torch.empty_like(heads[0]).stride()
    assert result.dtype == dtype
    assert off(result, expected(heads, tiles, width**-0.5)) < BOUNDS[dtype]


def test_several_batches() -> None:
    tiles = video_tiles(sequence(), 0.5).to(DEVICE)
    heads = drawn(len(tiles.of_row), 2, 32, torch.float32, batch=2)
    assert off(found(heads, tiles, 0.2), expected(heads, tiles, 0.2)) < BOUNDS[torch.float32]


def test_tiles_that_score_alike_are_taken_by_their_index() -> None:
    tiles = video_tiles(sequence(), 0.5).to(DEVICE)
    heads = drawn(len(tiles.of_row), 2, 32, torch.float32)
    # Every other tile of keys is zero: half of the scores are zeros of either sign, the others of all signs.
    for tile in range(0, len(tiles.rows), 2):
        heads[1][:, :, tiles.of_row == tile] = 0
    assert off(found(heads, tiles, 0.2), expected(heads, tiles, 0.2)) < BOUNDS[torch.float32]


@pytest.mark.parametrize("negative", [False, True])
def test_scores_of_every_magnitude_are_ranked(negative: bool) -> None:
    tiles = video_tiles(sequence(), 0.8).to(DEVICE)
    heads = drawn(len(tiles.of_row), 2, 32, torch.float32)
    scaled = 10.0 ** (tiles.of_row % 7 - 3).float()
    heads[0].copy_(heads[0].abs())
    heads[1].copy_(heads[1].abs() * scaled[:, None] * (-1 if negative else 1))
    # Scores of thousands are off by some 10^-4 in float32, and so are weights; another choice would change results.
    assert off(found(heads, tiles, 0.2), expected(heads, tiles, 0.2)) < 1e-4


def test_other_tiles_than_the_chosen_are_never_read() -> None:
    """Values of a tile that is on no list must not reach a result: dense attention would mix them in."""
    tiles = video_tiles(sequence(), 0.8).to(DEVICE)
    heads = drawn(len(tiles.of_row), 1, 32, torch.float32)
    # No tile but the last takes the last: its keys oppose all queries but its own.
    last = tiles.of_row == len(tiles.rows) - 1
    heads[0][:], heads[1][:] = heads[0].abs(), heads[1].abs()
    heads[1][:, :, last] *= -1
    scores = reference_scores(heads, tiles, 0.2)
    lists = chosen(scores, tiles.counts)[0, 0]
    prefix = int(tiles.counts[0])
    takers = lists[prefix:, -1].nonzero().flatten() + prefix
    assert len(takers) == 0
    values = heads[2].clone()
    values[:, :, last] = 1e6
    dirty = found((heads[0], heads[1], values, torch.zeros_like(heads[3])), tiles, 0.2)
    clean = found((*heads[:3], torch.zeros_like(heads[3])), tiles, 0.2)
    video = tiles.of_row >= prefix
    assert torch.equal(dirty[:, :, video], clean[:, :, video])
    assert not torch.equal(dirty[:, :, ~video], clean[:, :, ~video])


def reference_scores(heads: Heads, tiles: VideoTiles, scale: float) -> torch.Tensor:
    filled = (tiles.rows >= 0).unsqueeze(-1)
    means = [
        torch.where(filled, x.double()[:, :, tiles.rows.clamp_min(0)], 0).sum(-2) / filled.sum(-2) for x in heads[:2]
    ]
    return means[0] @ means[1].mT * scale


@ONLY_ON_GPU
def test_a_clip_of_ten_seconds_takes_no_memory_of_all_scores() -> None:
    frames, rows, columns = 72, 24, 42
    tiles = video_tiles(layout(torch.ones(512, dtype=torch.int64), (), frames, 2 * rows, 2 * columns, 405), 0.9)
    tiles = tiles.to(DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(1)
    shape = len(tiles.of_row), 56, 128
    heads = tuple(
        torch.randn(*shape, device=DEVICE, generator=generator, dtype=torch.bfloat16).transpose(0, 1).unsqueeze(0)
        for _ in range(4)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = found(heads, tiles, 128**-0.5)
    # Tiles laid out, three of them, the result, means, and the scratch: all scores would be 611 GB.
    assert torch.cuda.max_memory_allocated() - before < 5.5e9
    assert_tile(result, heads, tiles, len(tiles.rows) - 1)
    assert_tile(result, heads, tiles, 3)


@ONLY_ON_GPU
def test_rows_past_two_to_the_31_elements_are_addressed() -> None:
    tiles = video_tiles(layout(torch.ones(300, dtype=torch.int64), (), 158, 48, 84, 500), 0.9).to(DEVICE)
    rows = len(tiles.of_row)
    assert rows * 112 * 128 > 1 << 31
    heads = tuple(
        torch.randn(rows, 112, 128, device=DEVICE, dtype=torch.bfloat16).transpose(0, 1)[-2:].unsqueeze(0)
        for _ in range(4)
    )
    result = found(heads, tiles, 128**-0.5)
    assert_tile(result, heads, tiles, len(tiles.rows) - 1)
    assert_tile(result, heads, tiles, 0)


def assert_tile(result: torch.Tensor, heads: Heads, tiles: VideoTiles, tile: int) -> None:
    """One tile of the last head, in float64."""
    query, key, value, gate = (x[0, -1].double() for x in heads)
    scale = query.shape[-1] ** -0.5
    sizes = torch.bincount(tiles.of_row)[:, None]
    means = [x.new_zeros(len(sizes), x.shape[-1]).index_add_(0, tiles.of_row, x) / sizes for x in (query, key, value)]
    scores = means[0] @ means[1].T * scale
    rows = tiles.of_row == tile
    attended = chosen(scores[None, None], tiles.counts)[0, 0, tile][tiles.of_row]
    weights = torch.where(attended, query[rows] @ key.T * scale, -torch.inf).softmax(-1)
    exact = weights @ value + gate[rows] * (scores[tile].softmax(-1) @ means[2])
    assert exact.shape[0] <= TILE
    assert off(result[0, -1, rows], exact) < BOUNDS[torch.bfloat16]
