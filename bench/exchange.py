"""Rows exchanged for heads between two GPUs: writes into the peer's memory beside NCCL, with and without relayout.

Queries, keys and values lie as a block projects them: the values are a view of the packed projection. Each rank draws
its own numbers, and draws the other's as well to compare with, so that only what was really sent can be right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import host
from bench.measuring import Timing, in_turns
from bench.ranks import meet, together
from engines.plan import released_outline
from plugins.dimensions import DenoiserDimensions
from plugins.kernels.open_group import open_group
from plugins.ranks import Group, ProcessGroup

RANKS = 2

SIZES = {"632 MB sent by each rank": 58_816, "632 MB held by each rank": 29_408}
"""Rows of both ranks together. Half of what a rank holds, it sends."""

ROUNDS = 30

RAW, RELAID, PARTS, SYMMETRIC = "NCCL all-to-all", "NCCL and relayout", "NCCL part by part", "symmetric memory"
"""Of what is packed; with packing and laying out, all parts at once; what serves where the last cannot; ours."""


def measure(folder: Path) -> dict[str, Any]:
    """Milliseconds and GB/s of each side, in both directions, and whether their results are the right ones."""
    found = together(_measure, RANKS, folder / "exchange")
    sizes: dict[str, Any] = {}
    for name, rows in SIZES.items():
        ranks = [each["sizes"][name] for each in found]
        sizes[name] = {"rows": rows, **_directions(ranks)}
    return {
        "what": f"exchange of queries, keys and values (to heads) and of mixed values (to rows), {RANKS} GPUs",
        "host": found[0]["host"],
        "sizes": sizes,
    }


def _directions(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    directions = {}
    for direction in ("to heads", "to rows"):
        each = [rank[direction] for rank in ranks]
        # The ranks' rounds are the same exchanges: one is over when the last rank has all.
        slowest = {
            side: Timing(tuple(max(together) for together in zip(*(e["rounds"][side] for e in each), strict=True)))
            for side in each[0]["rounds"]
        }
        sent = each[0]["sent_bytes"]
        sides = {side: {**t.as_json(), "sent_gbps": sent / t.median / 1e6} for side, t in slowest.items()}
        directions[direction] = {
            "sent_bytes": sent,
            "sides": sides,
            "symmetric / NCCL and relayout": slowest[SYMMETRIC].median / slowest[RELAID].median,
            "equal": all(e["equal"] for e in each),
        }
    return directions


def _measure(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """One rank's part."""
    group = dist.group.WORLD
    assert group is not None
    collective, symmetric = ProcessGroup(group), open_group(group, device, "symmetric")
    size = released_outline().dimensions.denoiser
    sizes = {name: _size(rank, device, size, rows, collective, symmetric) for name, rows in SIZES.items()}
    return {"host": host.describe(), "sizes": sizes}


def _size(
    rank: int, device: torch.device, size: DenoiserDimensions, rows: int, collective: Group, symmetric: Group
) -> dict[str, Any]:
    every = [_projected(r, rows // RANKS, size, device) for r in range(RANKS)]
    mine, own = every[rank], slice(rank * size.heads // RANKS, (rank + 1) * size.heads // RANKS)
    expected = tuple(torch.cat([parts[i][:, own] for parts in every]) for i in range(len(mine)))
    del every
    forth = _direction(
        {
            RELAID: lambda: _relaid(mine),
            PARTS: lambda: collective.to_heads(mine, rows),
            SYMMETRIC: lambda: symmetric.to_heads(mine, rows),
        },
        mine,
        expected,
    )
    mixed, local = expected[2], rows // RANKS
    back = _direction(
        {
            RELAID: lambda: (collective.to_rows(mixed, local),),
            SYMMETRIC: lambda: (symmetric.to_rows(mixed, local),),
        },
        (mixed,),
        (mine[2],),
    )
    return {"to heads": forth, "to rows": back}


def _direction(
    sides: dict[str, Callable[[], tuple[torch.Tensor, ...]]],
    given: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
) -> dict[str, Any]:
    """Each side's rounds, and whether all results are bit-equal to the expected ones, before and after them."""
    packed = torch.cat([part.reshape(-1) for part in given])
    received = torch.empty_like(packed)
    raw = {RAW: lambda: dist.all_to_all_single(received, packed)}
    before = all(_equal(run(), expected) for run in sides.values())
    timings = in_turns({**raw, **sides}, ROUNDS, timer=meet)
    after = all(_equal(run(), expected) for run in sides.values())
    return {
        "rounds": {name: list(timing.rounds) for name, timing in timings.items()},
        "sent_bytes": packed.nbytes * (RANKS - 1) // RANKS,
        "equal": before and after,
    }


def _relaid(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Packed by rank, one all-to-all, and laid out by part."""
    sent = torch.stack([part.unflatten(1, (RANKS, -1)).movedim(1, 0) for part in parts], dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return tuple(part.flatten(0, 1) for part in received.movedim(1, 0))


def _equal(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def _projected(rank: int, local: int, size: DenoiserDimensions, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What a rank's rows are projected to: [n, heads, channels] each, of a seed of its own."""
    generator = torch.Generator(device).manual_seed(1 + rank)
    packed = torch.empty(local, size.heads, 3 * size.head_dim, dtype=torch.bfloat16, device=device)
    packed.normal_(generator=generator)
    query, key, value = packed.chunk(3, -1)
    return query.contiguous(), key.contiguous(), value
