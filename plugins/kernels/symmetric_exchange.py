"""Exchanges between GPUs of one host by writes into each other's memory: `exchange.cu` says how, here is what runs it.

The memory is torch's symmetric memory; NVLink multicast is not used. Results lie in memory that peers write: each
direction has two places in turns, so that a result may be held during the next exchange of its direction, not the one
after, which is refused as long as anything shares that memory.

Each exchange is a barrier, the kernel, and a barrier, all on torch's current stream; the host waits for nothing, and a
CUDA graph can hold it. A replay writes where the exchange was captured, so there is none once memory has grown. What
the barriers are for:

- Behind the kernel: a rank that has passed it knows that every rank's writes have come, since each rank's kernel has
  ended before that rank arrives, and arriving releases and passing acquires at the system's scope.
- In front of it: writes go where an earlier result was, which a slower peer may still be reading. A rank arrives when
  all that was queued before is done, so behind this barrier nobody reads it any more. Turns alone would not do: they
  are safe without this barrier only if a result is read before the next exchange begins, and if no graph that holds a
  single exchange is replayed.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from plugins.kernels.cuda_module import CudaModule, compile_cubin
from plugins.ranks import ProcessGroup

CAPABILITY, ABOVE = (9, 0), (12, 0)
"""Compute capabilities: the first with bulk copies, and the first whose processors have too little shared memory."""

MAX_RANKS = 16
"""Ranks of one host that a group may have."""

_VECTOR = 16
"""Bytes that bulk copies take multiples of."""

_WARP = 32
_RUNS = 64
_MAX_PIECE = 8192
"""Bytes of a row that go together."""

_ITEM = 32 << 10
_SHARED = 200 << 10
"""Bytes of an item and of all stages; the rows of either make it less."""

_FAR_BLOCKS, _NEAR_BLOCKS = 0.5, 0.5
"""Blocks for each of the GPU's processors: those that write to other ranks, and those that keep what stays."""

_TURNS = 2
"""Places that the results of one direction take in turns."""

_ALIGNMENT = 2 << 20
"""Bytes that memory is allocated in multiples of, as the driver does anyway."""

_SOURCE = Path(__file__).with_name("exchange.cu")

_NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""How torch is told, which has no other way. The second: each process may see its GPU alone, as the first one."""


class ExchangeError(RuntimeError):
    """An exchange cannot be made; says why."""


class _Run(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("source", "target")),
        *((n, ctypes.c_longlong) for n in ("source_row", "source_head", "target_row", "rows")),
    ]


class _Exchange(ctypes.Structure):
    _fields_ = [
        ("runs", _Run * _RUNS),
        ("groups", ctypes.c_longlong),
        *((n, ctypes.c_int) for n in ("far", "near", "far_blocks")),
    ]


class SymmetricGroup(ProcessGroup):
    """A group of GPUs of one host, which gathers and sums by NCCL. All exchanges are on one stream, or ordered by the
    caller.

    Memory grows when more rows come than ever before, which all ranks do together; not while a graph is captured.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device = device
        self._heads, self._rows = (_Memory(group, device) for _ in range(2))

    def to_heads(self, parts: Sequence[torch.Tensor], rows: int) -> tuple[torch.Tensor, ...]:
        """All `rows` of this rank's heads, [rows, H / size, d] each, contiguous; until the next call but one.

        Raises:
            ExchangeError: results of the last call but one are still held, or there is too little room while a graph
                is captured.
        """
        local, heads, channels = _shape(parts[0], self.size)
        if not _in_vectors(parts[0]):
            return super().to_heads(parts, rows)
        own = heads // self.size
        line = own * channels * parts[0].itemsize
        memory = self._heads.room(len(parts), rows * line)
        runs, sources = [], [_aligned(part) for part in parts]  # which live until the kernel is queued
        for part, memories in zip(sources, memory, strict=True):
            row, head = part.stride(0) * part.itemsize, part.stride(1) * part.itemsize
            count = min(max(rows - self.rank * local, 0), local)
            for peer in self._peers():
                source = part.data_ptr() + peer * own * head
                runs.append(_Run(source, memories[peer] + self.rank * local * line, row, head, line, count))
        self._run(self._heads, runs, own, channels * parts[0].itemsize)
        return self._heads.results(len(parts), (rows, own, channels), parts[0].dtype)

    def to_rows(self, part: torch.Tensor, local_rows: int) -> torch.Tensor:
        """This rank's rows of all heads, [local_rows, H, d], contiguous; until the next call but one.

        Raises:
            ExchangeError: the result of the last call but one is still held, or there is too little room while a graph
                is captured.
        """
        rows, own, channels = part.shape
        if not _in_vectors(part):
            return super().to_rows(part, local_rows)
        source = _aligned(part)
        row, head = source.stride(0) * part.itemsize, source.stride(1) * part.itemsize
        width = own * channels * part.itemsize
        line = self.size * width
        (memories,) = self._rows.room(1, local_rows * line)
        runs = [
            _Run(
                source.data_ptr() + peer * local_rows * row,
                memories[peer] + self.rank * width,
                *(row, head, line),
                self._valid(peer, rows, local_rows),
            )
            for peer in self._peers()
        ]
        self._run(self._rows, runs, own, channels * part.itemsize)
        (result,) = self._rows.results(1, (local_rows, self.size * own, channels), part.dtype)
        result[self._valid(self.rank, rows, local_rows) :].zero_()  # these nobody sends
        return result

    def _peers(self) -> list[int]:
        """Every rank, the next one first, so that no two ranks begin with the same; itself last."""
        return [(self.rank + 1 + i) % self.size for i in range(self.size)]

    @staticmethod
    def _valid(rank: int, rows: int, local_rows: int) -> int:
        """How many of a rank's rows are the sequence's."""
        return min(max(rows - rank * local_rows, 0), local_rows)

    def _run(self, memory: _Memory, runs: Sequence[_Run], heads: int, head_bytes: int) -> None:
        """Runs in the order of `_peers`, time and again."""
        shape = _Shape.of(heads, head_bytes)
        far: list[_Run] = []
        near: list[_Run] = []
        for place, run in enumerate(runs):
            (near if place % self.size == self.size - 1 else far).extend(shape.cut(run, heads))
        if len(far) + len(near) > _RUNS:
            raise ExchangeError(f"{heads} heads for each of {self.size} ranks: more than {_RUNS} runs of rows")
        groups = -(-max(run.rows for run in runs) // shape.rows)
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        blocks = [
            min(groups * len(some), int(share * processors))
            for some, share in ((far, _FAR_BLOCKS), (near, _NEAR_BLOCKS))
        ]
        memory.barrier()
        if groups:
            job = _Exchange((_Run * _RUNS)(*far, *near), groups, len(far), len(near), blocks[0])
            module = _module(shape, self._device)
            module.launch("exchange", (sum(blocks), 1, 1), _WARP, [job], shape.shared_bytes)
        memory.barrier()


@dataclass(frozen=True)
class _Shape:
    """What the kernel is compiled for: heads of a run, their bytes, rows of an item, and stages."""

    heads: int
    head_bytes: int
    rows: int
    stages: int

    @classmethod
    def of(cls, heads: int, head_bytes: int) -> _Shape:
        together = max(h for h in range(1, heads + 1) if heads % h == 0 and h * head_bytes <= _MAX_PIECE)
        piece = together * head_bytes
        rows = min(_WARP, _ITEM // piece)
        return cls(together, head_bytes, rows, min(16, _SHARED // (rows * piece)))

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.rows * self.heads * self.head_bytes

    def cut(self, run: _Run, heads: int) -> Iterator[_Run]:
        """A run of that many heads as several of this shape's."""
        for first in range(0, heads, self.heads):
            yield _Run(
                run.source + first * run.source_head,
                run.target + first * self.head_bytes,
                *(run.source_row, run.source_head, run.target_row, run.rows),
            )

    def source(self) -> str:
        """The CUDA source."""
        names = ("HEADS", "HEAD_BYTES", "ROWS", "STAGES", "RUNS")
        values = (self.heads, self.head_bytes, self.rows, self.stages, _RUNS)
        defines = "\n".join(f"#define {name} {value}" for name, value in zip(names, values, strict=True))
        return f"{defines}\n{_SOURCE.read_text()}"


class _Memory:
    """What one direction's results lie in: in each turn an allocation for each part, which all ranks map."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._turn = 0
        self._own: list[list[torch.Tensor]] = [[] for _ in range(_TURNS)]
        self._handles: list[list[symmetric._SymmetricMemory]] = [[] for _ in range(_TURNS)]

    def room(self, parts: int, nbytes: int) -> list[list[int]]:
        """Addresses on every rank of that many bytes for each part, for the next turn."""
        first = self._own[0]
        if len(first) < parts or len(first[0]) < nbytes:
            self._grow(max(parts, len(first)), max(nbytes, *(len(own) for own in first), 1))
        self._turn = (self._turn + 1) % _TURNS
        if any(_holders(own) > _FREE for own in self._own[self._turn][:parts]):
            raise ExchangeError("results of the last exchange but one are still held, where this one's would come")
        return [list(handle.buffer_ptrs) for handle in self._handles[self._turn][:parts]]

    def results(self, parts: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The parts of this turn, of one shape, where peers have written them."""
        nbytes = math.prod(shape) * dtype.itemsize
        return tuple(own[:nbytes].view(dtype).view(shape) for own in self._own[self._turn][:parts])

    def barrier(self) -> None:
        """On the current stream: nothing behind it begins on any rank before all that is in front has ended on all."""
        self._handles[0][0].barrier()

    def _grow(self, parts: int, nbytes: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ExchangeError(
                f"no room for {parts} parts of {nbytes} bytes while a graph is captured; exchange that much once before"
            )
        os.environ.update(_NO_MULTICAST)
        torch.cuda.synchronize(self._device)  # what was given back is written and read by nobody here
        torch.cuda.empty_cache()  # what torch keeps for tensors is of no use to this
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for turn in range(_TURNS):
            self._own[turn], self._handles[turn] = [], []
            for _ in range(parts):
                self._allocate(turn, size)

    def _allocate(self, turn: int, nbytes: int) -> None:
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=self._device)
        handle = symmetric.rendezvous(own, self._group)
        if handle.buffer_ptrs[handle.rank] != own.data_ptr():
            raise ExchangeError("torch's symmetric memory does not begin where its tensor does")
        self._own[turn].append(own)
        self._handles[turn].append(handle)


def _shape(part: torch.Tensor, ranks: int) -> tuple[int, int, int]:
    local, heads, channels = part.shape
    if heads % ranks:
        raise ExchangeError(f"{heads} heads for {ranks} ranks: the ranks must divide the heads")
    return local, heads, channels


def _in_vectors(part: torch.Tensor) -> bool:
    """Whether the kernel serves it: a question of shape and dtype alone, so that all ranks answer alike."""
    nbytes = part.shape[-1] * part.itemsize
    return part.numel() > 0 and nbytes % _VECTOR == 0 and nbytes <= _MAX_PIECE


def _aligned(part: torch.Tensor) -> torch.Tensor:
    """The same, where heads begin at multiples of 16 bytes and their channels lie side by side."""
    begins = (part.data_ptr(), part.stride(0) * part.itemsize, part.stride(1) * part.itemsize)
    return part.contiguous() if part.stride(-1) != 1 or any(b % _VECTOR for b in begins) else part


def _holders(memory: torch.Tensor) -> int:
    """How many tensors and storages share its memory."""
    return int(torch._C._storage_Use_Count(memory.untyped_storage()._cdata))


_FREE = _holders(torch.empty(1))
"""Of a tensor that nothing else shares."""


@cache
def _module(shape: _Shape, device: torch.device) -> CudaModule:
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return CudaModule(compile_cubin(shape.source(), architecture), device)
