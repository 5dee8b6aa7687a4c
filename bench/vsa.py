"""Video-sparse attention at the model's size beside dense attention and FlexAttention: time, its parts, and its error.

Operations are counted as of dense attention, 4 * rows^2 * 128 a head, so that rates say how much faster a clip is.
FlexAttention is given tiles laid out and chosen, and has no gate: what it is measured in is one part of ours,
"chosen tiles alone".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import host
from bench.attention import HEADS, SCALE, Inputs, own
from bench.measuring import ROUNDS, in_turns, kernels
from plugins.dimensions import TEXT_TAG
from plugins.kernels import flash_attention_3
from plugins.kernels.hopper_attention import BFLOAT16, HEAD
from plugins.ops.video_sparse_attention import OP, chosen
from plugins.video_tiles import TILE
from runtime.packing import layout
from runtime.video_tiles import VideoTiles, video_tiles

CLIPS = {58_880: (57, 320), 73_898: (72, 405)}
"""Latent frames and audio latents of 8 and 10 s of 1344x768, by the rows that a prompt fills up to."""

ROWS_AND_COLUMNS = 24, 42
"""Patches of a latent frame of 1344x768."""

SPARSITIES = (0.9, 0.8)
"""Of FastH3 v1 and of its 8-step model."""

CHECKED_TILES = 4
"""Tiles of queries, evenly spread, whose results are compared with float64's."""


@dataclass(frozen=True)
class Case:
    """Queries, keys, values and gates [1, H, S, 128], rows first in memory, and the tiles of their rows."""

    heads: tuple[torch.Tensor, ...]
    tiles: VideoTiles

    def ours(self) -> torch.Tensor:
        """The op, as blocks call it."""
        result: torch.Tensor = OP(*self.heads, self.tiles.rows, self.tiles.of_row, self.tiles.counts, SCALE)
        return result

    @property
    def dense(self) -> Inputs:
        """What dense attention takes."""
        query, key, value, _ = self.heads
        return query, key, value


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Every clip at every sparsity, on one GPU."""
    return {
        "what": f"video-sparse attention of {HEADS} heads of {HEAD}, bfloat16 in and out",
        "host": host.describe(),
        "clips": {f"{rows} rows": _clip(rows, rounds) for rows in CLIPS},
    }


def _clip(rows: int, rounds: int) -> dict[str, Any]:
    heads = _drawn(rows)
    cases = {f"sparsity {sparsity}": Case(heads, tiles_of(rows, sparsity)) for sparsity in SPARSITIES}
    case = next(iter(cases.values()))
    dense: dict[str, Callable[[], object]] = {"dense, ours": partial(own, BFLOAT16, case.dense)}
    if flash_attention_3.available():
        dense["dense, FlashAttention-3"] = lambda: flash_attention_3.attend(*case.dense, SCALE)
    sides = dense | {f"{name}, ours": one.ours for name, one in cases.items()}
    sides |= {f"{name}, FlexAttention": _flex(one) for name, one in cases.items()}
    timings = in_turns(sides, rounds)
    operations = 4.0 * rows**2 * HEAD * HEADS
    fastest = min(timings[name].median for name in dense)
    found: dict[str, Any] = {
        name: {**t.as_json(), "dense tflops": operations / t.median / 1e9, "of the fastest dense": t.median / fastest}
        for name, t in timings.items()
    }
    parts = {name: kernels(one.ours) for name, one in cases.items()}
    for name, seen in parts.items():
        alone = sum(float(kernel["ms"]) for kernel in seen if str(kernel["kernel"]).startswith("_attend"))
        found[f"{name}, ours"] |= {"chosen tiles alone, ms": alone, "kernels": seen}
        found[f"{name}, ours"]["error"] = error(cases[name])
    return found


def tiles_of(rows: int, sparsity: float) -> VideoTiles:
    """The tiles of one of the clips, on the GPU."""
    frames, audio = CLIPS[rows]
    height, width = ROWS_AND_COLUMNS
    text = rows - 2 * audio - frames * height * width
    sequence = layout(torch.full((text,), TEXT_TAG), (), frames, 2 * height, 2 * width, audio)
    return video_tiles(sequence, sparsity).to(torch.device("cuda"))


def error(case: Case) -> float:
    """Relative error of some tiles' results, of all heads, against float64."""
    found, picked = case.ours()[0], torch.linspace(0, len(case.tiles.rows) - 1, CHECKED_TILES).long().tolist()
    pairs = [(found[:, _filled(case, tile)].double(), _exact(case, tile)) for tile in picked]
    difference = sum(float((one - exact).square().sum()) for one, exact in pairs)
    return float((difference / sum(float(exact.square().sum()) for _, exact in pairs)) ** 0.5)


def _exact(case: Case, tile: int) -> torch.Tensor:
    """One tile's results in float64, head by head: [H, rows of the tile, 128]."""
    rows, tiles = _filled(case, tile), case.tiles
    results = []
    for query, key, value, gate in zip(*(x[0].double() for x in case.heads), strict=True):
        means = [_means(x, tiles) for x in (query, key, value)]
        scores = means[0] @ means[1].T * SCALE
        attended = chosen(scores[None, None], tiles.counts)[0, 0, tile][tiles.of_row]
        weights = torch.where(attended, query[rows] @ key.T * SCALE, -torch.inf).softmax(-1)
        results.append(weights @ value + gate[rows] * (scores[tile].softmax(-1) @ means[2]))
    return torch.stack(results)


def _means(x: torch.Tensor, tiles: VideoTiles) -> torch.Tensor:
    """Means [T, 128] of the tiles' rows."""
    sums = x.new_zeros(len(tiles.rows), x.shape[-1]).index_add_(0, tiles.of_row, x)
    return sums / (tiles.rows >= 0).sum(-1, keepdim=True)


def _filled(case: Case, tile: int) -> torch.Tensor:
    rows = case.tiles.rows[tile]
    return rows[rows >= 0]


def _drawn(rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = (torch.randn(rows, HEADS, HEAD, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(4))
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in drawn)


def _flex(case: Case) -> Callable[[], object]:
    """FlexAttention over rows laid out by tiles, of which it is told those that are chosen."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    places = case.tiles.rows.clamp_min(0).flatten()
    filled = (case.tiles.rows >= 0).flatten()
    query, key, value = (torch.where(filled[:, None], x[:, :, places], 0) for x in case.dense)
    whole = (case.tiles.rows >= 0).all(-1)
    scores = _flex_means(query, case) @ _flex_means(key, case).mT * SCALE
    attended = chosen(scores, case.tiles.counts)
    listed = [_listed(attended & where) for where in (~whole, whole)]

    def is_filled(batch: Any, head: Any, query_place: Any, key_place: Any) -> Any:
        return filled[key_place]

    mask = BlockMask.from_kv_blocks(*listed[0], *listed[1], BLOCK_SIZE=TILE, mask_mod=is_filled)
    options: Any = {"BLOCK_M": TILE, "BLOCK_N": TILE, "num_warps": 4, "num_stages": 2}
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, key, value, block_mask=mask, scale=SCALE, kernel_options=options)


def _flex_means(laid: torch.Tensor, case: Case) -> torch.Tensor:
    """Means [1, H, T, 128] of rows [1, H, T * 64, 128] laid out by tiles."""
    return laid.unflatten(2, (-1, TILE)).float().sum(3) / (case.tiles.rows >= 0).sum(-1, keepdim=True)


def _listed(attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles each tile attends to, and which, as BlockMask takes them: int32 [1, H, T] and [1, H, T, T]."""
    order = attended.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return attended.sum(-1, dtype=torch.int32), order.to(torch.int32)
