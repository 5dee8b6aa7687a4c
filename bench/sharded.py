"""Two blocks shared by two GPUs beside the same blocks on one: how far the results are apart, and what is gained.

Op by op (project, exchange, attend to the own heads, exchange back, finish), which is compared with float32 as well,
and compiled, one package for both ranks. The same numbers are drawn on each GPU, which takes its own rows of them.
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
from bench.synthetic import (
    PARTITION,
    RandomWeights,
    Wanted,
    compile_packages,
    draw_weight,
    open_engines,
    shared_by,
    synthetic_store,
)
from engines.declaration import tensor_record
from engines.profile import Profile, Ranks
from engines.sessions.engine_set import EngineSet
from export.binding import bind
from export.checkpoint import Checkpoint
from export.graphs.block import TABLE_ROWS, segments
from export.graphs.graph import Graph
from export.miniature import write_sparse_released
from export.trace import BoundModule
from plugins.dimensions import DenoiserDimensions
from plugins.kernels.open_group import open_group
from plugins.ranks import Group
from runtime.attention import BlocksAttention
from runtime.block import Sharing, open_blocks

RANKS = 2
BLOCKS = 2

ONE, TWO, COMPILED = "one GPU", f"{RANKS} GPUs", ", compiled"

PROFILE = "h200_inductor"
"""Of what is compiled."""

ROWS = (37_760, 73_920)

ROUNDS = 7

_PEAKED = 2.5
"""Factor of queries' and keys' norms: a row attends to a few others. Among many alike, what is lost would not show."""

_SCORES = 1 << 32
"""Bytes of scores that float32 attention holds at once."""

Rows = tuple[torch.Tensor, ...]
"""Hidden [n, D], modulation [table, 6 D], its index [n], cos and sin [n, half] of some rows."""


def measure(folder: Path, rows: tuple[int, ...] = ROWS, rounds: int = ROUNDS, compiled: bool = True) -> dict[str, Any]:
    """Milliseconds of both ways, and the differences of their results, for each number of rows."""
    work = folder / "sharded"
    if not (work / "checkpoint").exists():
        write_sparse_released(work / "checkpoint", "native")
    if compiled:
        compile_packages(folder, [_wanted(ranks) for ranks in (1, RANKS)])
    (work / "wanted").write_text(" ".join(map(str, (int(compiled), rounds, *rows))))
    found = together(_measure, RANKS, work, alone=True)
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
        "speed-ups": {
            side: timing.median / slowest[side.replace(ONE, TWO)].median
            for side, timing in slowest.items()
            if side.startswith(ONE)
        },
        "errors": {name: max(rank["errors"][name] for rank in ranks) for name in ranks[0]["errors"]},
    }


def _measure(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """One rank's part."""
    compiled, rounds, *rows = map(int, (folder / "wanted").read_text().split())
    checkpoint = Checkpoint.open(folder / "checkpoint")
    assert dist.group.WORLD is not None
    group = open_group(dist.group.WORLD, device)
    narrow, wide = (_Blocks.drawn(checkpoint, compute, device) for compute in (torch.bfloat16, torch.float32))
    engines = tuple(_opened(folder.parent, ranks) for ranks in (1, RANKS)) if compiled else ()
    sizes = {}
    with torch.no_grad():
        for count in rows:
            case = _Case(narrow, wide, engines, _draw(checkpoint.dimensions.denoiser, count, device), group)
            sizes[str(count)] = case.measure(rounds)
    return {"host": host.describe(), "rows": sizes}


class _Case:
    """One number of rows: all of them, and those of this rank."""

    def __init__(
        self, narrow: _Blocks, wide: _Blocks, engines: tuple[EngineSet, ...], inputs: Rows, group: Group
    ) -> None:
        self._narrow, self._wide, self._engines = narrow, wide, engines
        self._inputs, self._group, self._total = inputs, group, len(inputs[0])
        local = _wanted(RANKS).profile.local_rows(self._total)
        self._mine = slice(group.rank * local, min((group.rank + 1) * local, self._total))
        self._own = _padded(inputs, self._mine, local)

    def measure(self, rounds: int) -> dict[str, Any]:
        """Milliseconds of each round of each side, and how far results are apart."""
        sides = {ONE: lambda: self._narrow.run(self._inputs, _attend), TWO: self._shared}
        errors = self._errors(*(run() for run in sides.values()))
        if self._engines:
            compiled = {ONE + COMPILED: self._whole_engine, TWO + COMPILED: self._shared_engine}
            whole, part = (run() for run in compiled.values())
            errors[f"{TWO} from one, both compiled"] = _error(part[: self._count], whole[self._mine])
            sides |= compiled
            del whole, part
        timings = in_turns(sides, rounds, timer=meet)
        return {"errors": errors, "rounds": {name: list(timing.rounds) for name, timing in timings.items()}}

    def _errors(self, whole: torch.Tensor, part: torch.Tensor) -> dict[str, float]:
        whole, part = whole[self._mine], part[: self._count]
        inputs, mine = self._inputs, self._mine
        exact = self._wide.run(tuple(x.float() if x.is_floating_point() else x for x in inputs), _attend_exactly)[mine]
        again = self._narrow.run(inputs, _attend, pieces=3)[mine]
        apart = self._narrow.run(tuple(x if x is inputs[1] else x[mine] for x in inputs), _attend)
        return {
            f"{TWO} from one": _error(part, whole),
            f"{ONE} with other pieces from one": _error(again, whole),
            f"{ONE} from float32": _error(whole, exact),
            f"{TWO} from float32": _error(part, exact),
            f"{TWO} that do not exchange from one": _error(apart, whole),
        }

    @property
    def _count(self) -> int:
        """Rows here that are the sequence's."""
        return self._mine.stop - self._mine.start

    def _shared(self) -> torch.Tensor:
        return self._narrow.run(self._own, lambda *parts: _exchanged(self._group, parts, self._total))

    def _whole_engine(self) -> torch.Tensor:
        return _run(self._engines[0], self._inputs)

    def _shared_engine(self) -> torch.Tensor:
        return _run(self._engines[1], self._own, Sharing(self._group, self._total))


def _wanted(ranks: int) -> Wanted:
    """The block of a profile with that many ranks."""
    shared = Ranks(ulysses=ranks, text_encoder=1, video_tiles=1)
    return Wanted(shared_by(Profile.load(PROFILE), shared), ("block",))


def _opened(folder: Path, ranks: int) -> EngineSet:
    store = synthetic_store(_wanted(ranks), folder)
    weights = RandomWeights(store.manifest, ("block",))
    head_dim = store.manifest.dimensions.denoiser.head_dim
    for layer in range(BLOCKS):
        with weights.tensors("block", layer, PARTITION) as drawn:
            for weight in drawn.values():
                if weight.shape == (head_dim,):
                    weight.mul_(_PEAKED)
    return open_engines(store, ("block",), weights)


def _run(engines: EngineSet, inputs: Rows, sharing: Sharing | None = None) -> torch.Tensor:
    """Hidden behind the blocks, as a server computes it."""
    hidden, modulation, index, cos, sin = inputs
    rows = {"modulation_index": index, "cos": cos, "sin": sin}
    blocks = open_blocks(engines, PARTITION, rows, BlocksAttention(engines), sharing=sharing)
    for layer in range(BLOCKS):
        hidden = blocks.run(layer, hidden, modulation)
    return hidden


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
