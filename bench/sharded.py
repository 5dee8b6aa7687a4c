"""Two blocks shared by two GPUs beside the same blocks on one: how far the results are apart, and what is gained.

Project, exchange, attend to the own heads, exchange back, finish: the ops that engines call, in their fastest form.
The same numbers are drawn on each GPU, which takes its own rows of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import host
from bench.measuring import Timing, in_turns
from bench.ranks import meet, together
from bench.synthetic import PARTITION, draw_weight
from engines.declaration import tensor_record
from export.binding import bind
from export.checkpoint import Checkpoint
from export.graphs.block import TABLE_ROWS, segments
from export.graphs.graph import Graph
from export.miniature import write_sparse_released
from export.trace import BoundModule
from plugins.dimensions import DenoiserDimensions
from plugins.kernels.open_group import open_group
from plugins.ranks import Group

RANKS = 2
BLOCKS = 2

ROWS = (37_760, 73_920)

ROW_MULTIPLE = 64
"""Rows of a rank are a multiple of that many, so the last rank may end in padding."""

ROUNDS = 7

_PEAKED = 2.5
"""Factor of queries' and keys' norms: a row attends to a few others. Among many alike, what is lost would not show."""

_SCORES = 1 << 32
"""Bytes of scores that float32 attention holds at once."""

Rows = tuple[torch.Tensor, ...]
"""Hidden [n, D], modulation [table, 6 D], its index [n], cos and sin [n, half] of some rows."""


def measure(folder: Path, rows: tuple[int, ...] = ROWS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Milliseconds of both ways, and the differences of their results, for each number of rows."""
    work = folder / "sharded"
    if not (work / "checkpoint").exists():
        write_sparse_released(work / "checkpoint", "native")
    (work / "wanted").write_text(" ".join(map(str, (rounds, *rows))))
    found = together(_measure, RANKS, work)
    return {
        "what": f"{BLOCKS} blocks in bfloat16 on one GPU, and their rows shared by {RANKS}",
        "host": found[0]["host"],
        "rows": {str(r): _joined([rank["rows"][str(r)] for rank in found]) for r in rows},
    }


def _joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What takes the ranks together takes as long as the last of them."""
    slowest = {
        side: Timing(tuple(max(each) for each in zip(*(rank["rounds"][side] for rank in ranks), strict=True)))
        for side in ranks[0]["rounds"]
    }
    return {
        "sides": {side: timing.as_json() for side, timing in slowest.items()},
        "speed-up": slowest["one GPU"].median / slowest[f"{RANKS} GPUs"].median,
        "errors": {name: max(rank["errors"][name] for rank in ranks) for name in ranks[0]["errors"]},
    }


def _measure(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """One rank's part."""
    rounds, *rows = map(int, (folder / "wanted").read_text().split())
    checkpoint = Checkpoint.open(folder / "checkpoint")
    assert dist.group.WORLD is not None
    group = open_group(dist.group.WORLD, device)
    narrow, wide = (_Blocks.drawn(checkpoint, compute, device) for compute in (torch.bfloat16, torch.float32))
    with torch.no_grad():
        sizes = {
            str(r): _size(narrow, wide, _draw(checkpoint.dimensions.denoiser, r, device), group, rounds) for r in rows
        }
    return {"host": host.describe(), "rows": sizes}


def _size(narrow: _Blocks, wide: _Blocks, inputs: Rows, group: Group, rounds: int) -> dict[str, Any]:
    total = len(inputs[0])
    local = -(-total // (RANKS * ROW_MULTIPLE)) * ROW_MULTIPLE
    mine = slice(group.rank * local, min((group.rank + 1) * local, total))
    own = _padded(inputs, mine, local)

    def alone() -> torch.Tensor:
        return narrow.run(inputs, _attend)

    def shared() -> torch.Tensor:
        return narrow.run(own, lambda *parts: _exchanged(group, parts, total))

    whole, part = alone()[mine], shared()[: mine.stop - mine.start]
    apart = narrow.run(tuple(x if x is inputs[1] else x[mine] for x in inputs), _attend)
    again = narrow.run(inputs, _attend, pieces=3)[mine]
    exact = wide.run(tuple(x.float() if x.is_floating_point() else x for x in inputs), _attend_exactly)[mine]
    errors = {
        "two GPUs from one": _error(part, whole),
        "one GPU with other pieces from one": _error(again, whole),
        "one GPU from float32": _error(whole, exact),
        "two GPUs from float32": _error(part, exact),
        "two GPUs that do not exchange from one": _error(apart, whole),
    }
    del whole, part, apart, again, exact
    timings = in_turns({"one GPU": alone, f"{RANKS} GPUs": shared}, rounds, timer=meet)
    return {"errors": errors, "rounds": {name: list(timing.rounds) for name, timing in timings.items()}}


@dataclass(frozen=True)
class _Blocks:
    """Both halves of each block, and its weights."""

    project: tuple[Callable[[Rows], Rows], ...]
    finish: tuple[Callable[[Rows], torch.Tensor], ...]

    @classmethod
    def drawn(cls, checkpoint: Checkpoint, compute: torch.dtype, device: torch.device) -> _Blocks:
        project, _, finish = segments(checkpoint, PARTITION, compute)
        head_dim = checkpoint.dimensions.denoiser.head_dim
        return cls(
            *(tuple(_bound(graph, layer, head_dim, device) for layer in range(BLOCKS)) for graph in (project, finish))
        )

    def run(self, inputs: Rows, attend: Callable[..., torch.Tensor], pieces: int = 1) -> torch.Tensor:
        """Hidden behind the blocks; what is done row by row in so many pieces."""
        hidden, modulation, index, cos, sin = inputs
        for project, finish in zip(self.project, self.finish, strict=True):
            chunks = list(zip(*(x.chunk(pieces) for x in (hidden, index, cos, sin)), strict=True))
            projected = [project((h, modulation, i, c, s)) for h, i, c, s in chunks]
            mixed = attend(*(torch.cat(part) if pieces > 1 else part[0] for part in zip(*projected, strict=True)))
            del projected
            parts = zip(hidden.chunk(pieces), mixed.chunk(pieces), index.chunk(pieces), strict=True)
            hidden = torch.cat([finish((h, m, modulation, i)) for h, m, i in parts])
        return hidden


def _bound(graph: Graph, layer: int, head_dim: int, device: torch.device) -> Callable[[Rows], Any]:
    binding = bind(graph)
    module = BoundModule(graph, binding, layer)
    stored = binding.instances[layer]
    weights = []
    for spec in binding.inputs:
        # By its name, so that every rank and every compute dtype has the same.
        seed = zlib.crc32(stored[spec.name].key.encode())
        memory = torch.empty(stored[spec.name].shape, dtype=spec.dtype, device=device)
        weight = draw_weight(tensor_record(spec), memory, torch.Generator(device).manual_seed(seed))
        weights.append(weight.mul_(_PEAKED) if weight.shape == (head_dim,) else weight)
    return lambda inputs: module(inputs, tuple(weights))


def _draw(size: DenoiserDimensions, rows: int, device: torch.device) -> Rows:
    generator = torch.Generator(device).manual_seed(rows)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    angles = normal(rows, 3 * size.rope_frequencies, dtype=torch.float32)
    index = torch.randint(TABLE_ROWS, (rows,), device=device, generator=generator)
    modulation = 0.3 * normal(TABLE_ROWS, 6 * size.hidden)
    return normal(rows, size.hidden), modulation, index, angles.cos(), angles.sin()


def _padded(inputs: Rows, mine: slice, local: int) -> Rows:
    """A rank's rows, the last of which are NaN where the sequence has no more: nothing may come of them."""
    hidden, modulation, *others = inputs
    missing = local - (mine.stop - mine.start)
    padding = hidden.new_full((missing, hidden.shape[1]), float("nan"))
    rest = (torch.cat([x[mine], x.new_zeros(missing, *x.shape[1:])]) for x in others)
    return torch.cat([hidden[mine], padding]), modulation, *rest


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    from export.graphs.block import Attend

    mixed = Attend()(query, key, value)
    assert isinstance(mixed, torch.Tensor)
    return mixed


def _exchanged(group: Group, parts: Rows, rows: int) -> torch.Tensor:
    heads = group.to_heads(parts, rows)
    mixed = _attend(*heads).unflatten(1, heads[0].shape[1:])
    return group.to_rows(mixed, len(parts[0])).flatten(1)


def _attend_exactly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax and products as the formula has them, some rows at a time."""
    step = max(1, _SCORES // (key.shape[0] * key.shape[1] * key.itemsize))
    keys, values = key.permute(1, 2, 0).contiguous(), value.transpose(0, 1).contiguous()
    scale = key.shape[-1] ** -0.5
    mixed = (torch.softmax((rows.transpose(0, 1) * scale) @ keys, -1) @ values for rows in query.split(step))
    return torch.cat([part.transpose(0, 1).flatten(1) for part in mixed])


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Length of the difference over the length of what is compared with."""
    return float((found.float() - exact.float()).norm() / exact.float().norm())
