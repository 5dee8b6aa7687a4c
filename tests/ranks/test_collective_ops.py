"""The ops that exchange, between real processes: each rank gives other numbers, and gets those of the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from plugins.ops.all_reduce import OP as ALL_REDUCE
from plugins.ops.ulysses_all_to_all import HEADS, ROWS
from plugins.ranks import ProcessGroup, handle_of
from tests.ranks.spawn import run_ranks

SIZE = 4
HEADS_NUMBER, WIDTH = 8, 5
ROW_COUNTS = (1, 3, 4, 7, 16, 33)


def whole(rows: int, part: int) -> torch.Tensor:
    """[rows, heads, WIDTH], the same on every rank."""
    return torch.randn(rows, HEADS_NUMBER, WIDTH, generator=torch.Generator().manual_seed(100 * rows + part))


def exchange(rank: int, size: int) -> Mapping[str, torch.Tensor]:
    """What each op gives this rank: in the group of all, and in the half that it belongs to."""
    halves = [dist.new_group([first, first + 1]) for first in (0, 2)]
    everybody = dist.new_group(range(size))
    groups = {"all": ProcessGroup(everybody), "half": ProcessGroup(halves[rank // 2])}
    found: dict[str, torch.Tensor] = {}
    for name, group in groups.items():
        handle = torch.tensor([handle_of(group)])
        for rows in ROW_COUNTS:
            # The halves exchange numbers of their own: what came from the other would show.
            tag = 10 * (rank // 2) if name == "half" else 0
            local = -(-rows // group.size)
            parts = [padded(whole(rows, part + tag), group.rank, local) for part in range(3)]
            heads = HEADS(*parts, torch.zeros(rows), handle, group.size)
            found |= {f"{name}.{rows}.{part}": heads[part] for part in range(3)}
            found[f"{name}.{rows}.back"] = ROWS(heads[2] * 2, parts[0], handle, group.size)
        found[f"{name}.sum"] = ALL_REDUCE(whole(3, rank), handle, group.size)
    return found


def padded(rows: torch.Tensor, rank: int, local: int) -> torch.Tensor:
    held = rows[rank * local : (rank + 1) * local]
    return torch.cat([held, torch.full((local - len(held), *held.shape[1:]), torch.nan)])


def test_ranks_exchange_rows_for_heads_and_back_inside_their_group_alone(tmp_path: Path) -> None:
    everything = run_ranks(exchange, SIZE, tmp_path / "ranks", timeout=60)
    for rank, found in enumerate(everything):
        for name, size, place, tag in (("all", SIZE, rank, 0), ("half", 2, rank % 2, 10 * (rank // 2))):
            share = HEADS_NUMBER // size
            for rows in ROW_COUNTS:
                for part in range(3):
                    mine = whole(rows, part + tag)[:, place * share : (place + 1) * share]
                    assert torch.equal(found[f"{name}.{rows}.{part}"], mine)
                back = padded(whole(rows, 2 + tag) * 2, place, -(-rows // size)).nan_to_num()
                assert torch.equal(found[f"{name}.{rows}.back"], back)
    sums = {"all": [range(SIZE)] * SIZE, "half": [range(2)] * 2 + [range(2, 4)] * 2}
    for name, members in sums.items():
        for rank, found in enumerate(everything):
            expected = sum(whole(3, member).double() for member in members[rank])
            # Up to four terms of order 1 in float32.
            assert (found[f"{name}.sum"] - expected).abs().max() < 1e-6
    assert all(torch.equal(everything[0]["all.sum"], found["all.sum"]) for found in everything)
