"""Groups inside a group: each exchanges among its own ranks, whatever the others exchange at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plugins.ranks import ProcessGroup
from tests.ranks.spawn import run_ranks

HEADS, DIM = 4, 3

GROUPS = {"pair": ((0, 1), (2, 3)), "single": ((0,), (1,), (2,), (3,)), "crossed": ((0, 2), (1, 3))}


def sequence(name: str, members: tuple[int, ...], rows: int) -> list[torch.Tensor]:
    """Queries, keys and values [rows, heads, head_dim] that nobody but these ranks has."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 10 * members[0])
    return [torch.randn(rows, HEADS, DIM, generator=generator) for _ in range(3)]


def exchange(rank: int, size: int, rows: int) -> dict[str, torch.Tensor]:
    """What a rank receives in each of its groups."""
    made = {key: dist.new_group(list(key[1])) for key in _keys()}
    found: dict[str, torch.Tensor] = {}
    for name, groups in GROUPS.items():
        members = next(members for members in groups if rank in members)
        group = ProcessGroup(made[name, members])
        local = -(-rows // group.size)
        padded = [
            torch.cat([part, torch.full((local * group.size - rows, HEADS, DIM), 9.0)])
            for part in sequence(name, members, rows)
        ]
        here = [part[group.rank * local :][:local] for part in padded]
        heads = group.to_heads(here, rows)
        found |= {f"{name} heads {i}": part for i, part in enumerate(heads)}
        found[f"{name} rows"] = group.to_rows(heads[0], local)
        found[f"{name} gathered"] = group.gather_rows(here[0].flatten(1), rows)
        found[f"{name} sum"] = group.sum(here[0])
    return found


def _keys() -> list[tuple[str, tuple[int, ...]]]:
    return [(name, members) for name, groups in GROUPS.items() for members in groups]


@pytest.mark.parametrize("rows", [1, 6, 7])
def test_a_group_receives_from_its_own_ranks_alone(tmp_path: Path, rows: int) -> None:
    ranks = run_ranks(exchange, 4, tmp_path, rows)
    for name, members in _keys():
        whole, local = sequence(name, members, rows), -(-rows // len(members))
        padding = local * len(members) - rows
        shares = torch.cat([whole[0], torch.full((padding, HEADS, DIM), 9.0)]).chunk(len(members))
        width = HEADS // len(members)
        for place, rank in enumerate(members):
            found = ranks[rank]
            for i, part in enumerate(whole):
                assert torch.equal(found[f"{name} heads {i}"], part[:, place * width : (place + 1) * width])
            mine = whole[0][place * local :][:local]
            assert torch.equal(found[f"{name} rows"][: len(mine)], mine)
            assert not found[f"{name} rows"][len(mine) :].any(), "padding of another rank came back"
            assert torch.equal(found[f"{name} gathered"], whole[0].flatten(1))
            assert torch.equal(found[f"{name} sum"], torch.stack(list(shares)).sum(0))
