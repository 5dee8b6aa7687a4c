"""Exchanges between two GPUs, by writes into each other's memory and over NCCL, against slices of what each rank drew.

Two processes do all of it once; each test reads what they found.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.ranks import together
from plugins.kernels.open_group import open_group
from plugins.kernels.symmetric_exchange import ExchangeError, SymmetricGroup
from plugins.ranks import Group

RANKS = 2
HEADS = 56

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < RANKS, reason=f"torch finds {torch.cuda.device_count()} CUDA devices, {RANKS} exchange"
)

ROWS = {"dividing": (512, 256), "padded": (500, 256), "one row beyond": (257, 256), "a rank of padding": (200, 256)}
"""Rows of the sequence, and of a rank."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(checks, RANKS, tmp_path_factory.mktemp("exchange"), limit=120)


def holds(found: list[dict[str, Any]], name: str) -> bool:
    return all(each[name] for each in found)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("way", ["symmetric", "collective"])
def test_every_row_of_the_own_heads_arrives_and_goes_back(
    found: list[dict[str, Any]], way: str, dtype: str, rows: str
) -> None:
    assert holds(found, f"{way}, {dtype}, {rows}")


def test_writes_are_chosen_and_can_be_refused(found: list[dict[str, Any]]) -> None:
    assert holds(found, "chosen")
    assert holds(found, "asked for")


def test_results_are_contiguous_and_share_no_memory(found: list[dict[str, Any]]) -> None:
    assert holds(found, "apart")


def test_heads_that_writes_do_not_serve_go_the_other_way(found: list[dict[str, Any]]) -> None:
    assert holds(found, "odd channels")
    assert holds(found, "unaligned")


def test_rows_beyond_32_bit_offsets_arrive(found: list[dict[str, Any]]) -> None:
    assert holds(found, "far")


def test_a_rank_that_is_late_reads_what_was_meant_for_it(found: list[dict[str, Any]]) -> None:
    assert holds(found, "late")


def test_a_cuda_graph_exchanges_what_its_inputs_hold(found: list[dict[str, Any]]) -> None:
    assert holds(found, "graph")


def test_a_result_may_be_held_during_the_next_exchange_and_is_not_overwritten_by_the_one_after(
    found: list[dict[str, Any]],
) -> None:
    assert holds(found, "held")


def test_memory_does_not_grow_within_a_graph(found: list[dict[str, Any]]) -> None:
    assert holds(found, "capture without room")


def test_rows_are_gathered_and_summed(found: list[dict[str, Any]]) -> None:
    assert holds(found, "gathered")
    assert holds(found, "summed")


def test_ranks_that_see_their_own_gpu_alone_write_into_the_others_memory(tmp_path: Path) -> None:
    assert holds(together(chosen, RANKS, tmp_path, limit=60, alone=True), "chosen")


def chosen(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """Whether one rank chooses to write into memory."""
    assert dist.group.WORLD is not None
    return {"chosen": isinstance(open_group(dist.group.WORLD, device), SymmetricGroup)}


def checks(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """What one rank finds."""
    assert dist.group.WORLD is not None
    chosen, asked = open_group(dist.group.WORLD, device), open_group(dist.group.WORLD, device, "collective")
    groups: dict[str, Group] = {"symmetric": chosen, "collective": asked}
    seen = {"chosen": isinstance(chosen, SymmetricGroup), "asked for": not isinstance(asked, SymmetricGroup)}
    for way, group in groups.items():
        for dtype in (torch.bfloat16, torch.float32):
            for name, (rows, local) in ROWS.items():
                key = f"{way}, {str(dtype).removeprefix('torch.')}, {name}"
                seen[key] = _there_and_back(group, drawn(rows, dtype), rows, local, device)
    seen["apart"] = _apart(chosen, device)
    seen["odd channels"] = _there_and_back(chosen, drawn(512, torch.float32, channels=3), 512, 256, device)
    seen["unaligned"] = _there_and_back(chosen, drawn(512, torch.bfloat16, channels=129)[..., 1:], 512, 256, device)
    seen["far"] = _far(chosen, device)
    seen["late"] = _late(chosen, device)
    seen["graph"] = _graph(chosen, device)
    seen["held"] = _refused(lambda: _held(chosen, device))
    world = dist.group.WORLD
    seen["capture without room"] = _refused(lambda: _without_room(world, device))
    seen["gathered"], seen["summed"] = _others(chosen, device)
    return seen


def drawn(rows: int, dtype: torch.dtype, channels: int = 128, seed: int = 0) -> torch.Tensor:
    """The projected rows of the whole sequence, [rows, heads, 3 * channels], which every rank can draw."""
    generator = torch.Generator("cuda").manual_seed(rows + seed)
    return torch.randn(rows, HEADS, 3 * channels, device="cuda", generator=generator).to(dtype)


def _own(rank: int) -> slice:
    return slice(rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS)


def _padded(every: torch.Tensor, rank: int, local: int) -> torch.Tensor:
    """A rank's rows, NaN where the sequence has no more."""
    mine = every[rank * local : (rank + 1) * local]
    return torch.cat([mine, mine.new_full((local - len(mine), *mine.shape[1:]), float("nan"))])


def _there_and_back(group: Group, every: torch.Tensor, rows: int, local: int, device: torch.device) -> bool:
    """Views of a packed projection, and with fewer and more parts; what comes, and what comes back."""
    mine = _padded(every, group.rank, local)
    right = True
    for count in (3, 1, 4):
        width = every.shape[2] // count
        parts = mine[..., : count * width].split(width, -1)
        came = group.to_heads(parts, rows)
        wanted = every[:, _own(group.rank), : count * width].split(width, -1)
        right &= all(torch.equal(a, b) for a, b in zip(came, wanted, strict=True))
        back = group.to_rows(came[-1], local)
        sent = torch.nan_to_num(parts[-1], nan=0.0)
        right &= back.shape == sent.shape and torch.equal(back, sent)
        del came, back
    return right


def _apart(group: Group, device: torch.device) -> bool:
    came = group.to_heads(_padded(drawn(512, torch.bfloat16), group.rank, 256).chunk(3, -1), 512)
    storages = {part.untyped_storage().data_ptr() for part in came}
    return all(part.is_contiguous() for part in came) and len(storages) == len(came)


def _far(group: Group, device: torch.device) -> bool:
    """Packed rows of 43,008 bytes reach beyond 2^31; 4 parts of two ranks' rows do so as well."""
    rows = 110_592
    local = rows // RANKS
    packed = torch.empty(local, HEADS, 3 * 128, dtype=torch.bfloat16, device=device)
    packed.copy_(torch.arange(local, device=device).remainder(251).view(-1, 1, 1) + (1 + group.rank) / 4)
    (came,) = group.to_heads([packed[..., 256:]], rows)
    row = torch.arange(local, device=device).remainder(251).view(-1, 1, 1)
    wanted = torch.cat([(row + (1 + rank) / 4).bfloat16() for rank in range(RANKS)])
    arrived = bool((came == wanted).all())
    back = group.to_rows(came, local)
    return arrived and torch.equal(back, packed[..., 256:])


def _late(group: Group, device: torch.device, rounds: int = 40) -> bool:
    """Exchanges without a pause, in which now one rank and now the other is late to read, and late to send."""
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    every = [drawn(512, torch.bfloat16, seed=1 + i) for i in range(4)]
    for i in range(rounds):
        whole = every[i % 4]
        mine = whole[256 * group.rank :][:256]
        if i % 3 == group.rank:
            torch.cuda._sleep(2_000_000)
        came = group.to_heads(mine.chunk(3, -1), 512)
        if i % 5 == group.rank:
            torch.cuda._sleep(2_000_000)
        wanted = whole[:, _own(group.rank)].chunk(3, -1)
        for part, right in zip(came, wanted, strict=True):
            wrong += (part != right).sum()
        if i % 2:
            wrong += (group.to_rows(came[2], 256) != mine[..., 256:]).sum()
        del came, part
    return int(wrong) == 0


def _graph(group: Group, device: torch.device) -> bool:
    """Both exchanges in one graph, replayed with other inputs without a pause."""
    given = torch.empty(256, HEADS, 3 * 128, dtype=torch.bfloat16, device=device)
    sums = torch.empty(256, HEADS, 128, dtype=torch.bfloat16, device=device)

    def run() -> None:
        query, key, value = group.to_heads(given.chunk(3, -1), 512)
        sums.copy_(group.to_rows(query + key + value, 256))

    given.zero_()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    right = True
    for seed in range(5):
        mine = drawn(512, torch.bfloat16, seed=seed)[256 * group.rank :][:256]
        given.copy_(mine)
        graph.replay()
        query, key, value = mine.chunk(3, -1)
        right &= torch.equal(sums, query + key + value)
    return right


def _held(group: Group, device: torch.device) -> None:
    parts = drawn(512, torch.bfloat16)[256 * group.rank :][:256].chunk(3, -1)
    kept = group.to_heads(parts, 512)
    copy = kept[0].clone()
    group.to_heads([2 * part for part in parts], 512)
    assert torch.equal(kept[0], copy)
    group.to_heads(parts, 512)


def _without_room(world: dist.ProcessGroup, device: torch.device) -> None:
    fresh = SymmetricGroup(world, device)
    parts = drawn(512, torch.bfloat16)[:256].chunk(3, -1)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        fresh.to_heads(parts, 512)


def _refused(run: Callable[[], None]) -> bool:
    try:
        run()
    except ExchangeError:
        return True
    return False


def _others(group: Group, device: torch.device) -> tuple[bool, bool]:
    every = drawn(500, torch.float32)[:, :4, 0]
    mine = _padded(every, group.rank, 256)
    total = group.sum(mine)
    added = sum(_padded(every, rank, 256) for rank in range(RANKS))
    gathered = torch.equal(group.gather_rows(mine, 500), every)
    return gathered, torch.equal(torch.nan_to_num(total), torch.nan_to_num(torch.as_tensor(added)))
