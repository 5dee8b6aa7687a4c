"""Groups inside a group: each exchanges among its own ranks, whatever the others exchange at the same time."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist

from plugins.ranks import ProcessGroup
from tests.ranks.spawn import run_ranks

HEADS, DIM = 4, 3
ROWS = (1, 6, 7)

GROUPS = {"pair": ((0, 1), (2, 3)), "single": ((0,), (1,), (2,), (3,)), "crossed": ((0, 2), (1, 3))}


def sequence(name: str, members: tuple[int, ...], rows: int) -> list[torch.Tensor]:
    """Queries, keys and values [rows, heads, head_dim] that nobody but these ranks has."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 10 * members[0])
    return [torch.randn(rows, HEADS, DIM, generator=generator) for _ in range(3)]


def exchange(rank: int, size: int) -> dict[str, torch.Tensor]:
    """What a rank receives in each of its groups."""
    made = {key: dist.new_group(list(key[1])) for key in _keys()}
    found: dict[str, torch.Tensor] = {}
    for name, groups in GROUPS.items():
        members = next(members for members in groups if rank in members)
        group = ProcessGroup(made[name, members])
        for rows in ROWS:
            here = [padded(part, group.size)[group.rank] for part in sequence(name, members, rows)]
            heads = group.to_heads(here, rows)
            found |= {f"{name} {rows} heads {i}": part for i, part in enumerate(heads)}
            found[f"{name} {rows} rows"] = group.to_rows(heads[0], len(here[0]))
            found[f"{name} {rows} gathered"] = group.gather_rows(here[0].flatten(1), rows)
            found[f"{name} {rows} sum"] = group.sum(here[0])
    return found


def padded(part: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The rows of each rank; behind the last there are others than zeros, which must not be seen again."""
    local = -(-len(part) // size)
    return list(torch.cat([part, part.new_full((local * size - len(part), HEADS, DIM), 9.0)]).split(local))


def _keys() -> list[tuple[str, tuple[int, ...]]]:
    return [(name, members) for name, groups in GROUPS.items() for members in groups]


def test_a_group_receives_from_its_own_ranks_alone(tmp_path: Path) -> None:
    ranks = run_ranks(exchange, 4, tmp_path)
    for (name, members), rows in itertools.product(_keys(), ROWS):
        whole, width = sequence(name, members, rows), HEADS // len(members)
        shares = padded(whole[0], len(members))
        for place, rank in enumerate(members):
            found = {key: ranks[rank][f"{name} {rows} {key}"] for key in ("rows", "gathered", "sum")}
            for i, part in enumerate(whole):
                heads = ranks[rank][f"{name} {rows} heads {i}"]
                assert torch.equal(heads, part[:, place * width : (place + 1) * width])
            mine = whole[0][place * len(shares[0]) :][: len(shares[0])]
            assert torch.equal(found["rows"][: len(mine)], mine)
            assert not found["rows"][len(mine) :].any(), "padding of another rank came back"
            assert torch.equal(found["gathered"], whole[0].flatten(1))
            assert torch.equal(found["sum"], torch.stack(shares).sum(0))
