"""What the ranks of one group do together: exchange rows for heads and back, gather rows, and add up.

A sequence-parallel group holds the packed sequence in equal runs of rows, the last of which end in padding. Attention
wants all rows of some heads, so rows are exchanged for heads before it and heads for rows behind it. Padding rows never
leave their rank: what attention reads has the sequence's rows and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

# Its name since torch 2.13, where the older one is deprecated.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group(Protocol):
    """One rank's part in its group. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank's place in the group, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def to_heads(self, parts: Sequence[torch.Tensor], rows: int) -> tuple[torch.Tensor, ...]:
        """Rows of all heads [n, H, d], of every rank, to all `rows` of this rank's heads [rows, H / size, d] each.

        n is the same on every rank, and at least rows / size. All parts have one shape and dtype.
        """

    def to_rows(self, part: torch.Tensor, local_rows: int) -> torch.Tensor:
        """All rows of this rank's heads [rows, H / size, d] to this rank's rows of all heads [local_rows, H, d].

        Rows that the sequence does not have are zeros.
        """

    def gather_rows(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Every rank's rows [n, ...] to all of them [rows, ...], on every rank."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's float32 tensor of one shape, bit-equal on every rank."""


class ProcessGroup:
    """A group over torch's collectives, whatever they run on: gloo between CPU processes, NCCL between GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def communicator(self) -> int:
        """Address of NCCL's communicator of the group on this process' GPU; all ranks ask for it together.

        Raises:
            RuntimeError: the group has no such thing; gloo's has none.
        """
        backend: Any = self._group._get_backend(torch.device("cuda"))
        self.gather_rows(torch.zeros(1, device="cuda"), self.size)  # there is none before the first collective
        return int(backend._comm_ptr())

    def to_heads(self, parts: Sequence[torch.Tensor], rows: int) -> tuple[torch.Tensor, ...]:
        """All `rows` of this rank's heads, [rows, H / size, d] each."""
        # Part by part: what comes of one is whole as it lies, where parts that came together would have to be copied.
        return tuple(self._to_heads(part, rows) for part in parts)

    def _to_heads(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        sent = part.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received.flatten(0, 1)[:rows]

    def to_rows(self, part: torch.Tensor, local_rows: int) -> torch.Tensor:
        """This rank's rows of all heads, [local_rows, H, d]."""
        padding = part.new_zeros(local_rows * self.size - len(part), *part.shape[1:])
        sent = torch.cat([part, padding]) if len(padding) else part.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received.unflatten(0, (self.size, -1)).movedim(0, 1).flatten(1, 2)

    def gather_rows(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """All rows of every rank, [rows, ...]."""
        gathered = part.new_empty(len(part) * self.size, *part.shape[1:])
        _gather(gathered, part.contiguous(), group=self._group)
        return gathered[:rows]

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        # Each rank adds up a share of the numbers, in the order of the ranks, and hands it out: all have the same bits,
        # and what is sent does not grow with the ranks.
        flat = nn.functional.pad(part.flatten(), (0, -part.numel() % self.size))
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat, group=self._group)
        total = self.gather_rows(parts.unflatten(0, (self.size, -1)).sum(0), part.numel())
        return total.view(part.shape)


class Loopback:
    """One process that receives what it sends: a group of one; and, of any size, what identity makes of an exchange.

    Graphs say collectives as identity where nothing runs them (`plugins.ops.dist_collective`); over this group the ops
    compute the same, so that the rest of such a graph can be compared.
    """

    def __init__(self, size: int = 1) -> None:
        self.rank, self.size = 0, size

    def to_heads(self, parts: Sequence[torch.Tensor], rows: int) -> tuple[torch.Tensor, ...]:
        """[rows, H / size, d] each: rows of the first heads, then of the next."""
        turned = (part.unflatten(1, (self.size, -1)).movedim(1, 0).flatten(0, 1) for part in parts)
        return tuple(part[:rows].clone(memory_format=torch.contiguous_format) for part in turned)

    def to_rows(self, part: torch.Tensor, local_rows: int) -> torch.Tensor:
        """[local_rows, H, d]: the inverse."""
        padding = part.new_zeros(local_rows * self.size - len(part), *part.shape[1:])
        turned = torch.cat([part, padding]).unflatten(0, (self.size, -1)).movedim(0, 1)
        return turned.flatten(1, 2).clone(memory_format=torch.contiguous_format)

    def gather_rows(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """The same rows from every rank, [rows, ...]."""
        return part.repeat(self.size, *(1 for _ in part.shape[1:]))[:rows]

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The part itself."""
        return part.clone(memory_format=torch.contiguous_format)


_OPEN: list[Group] = []


def handle_of(group: Group) -> int:
    """A number that an engine's input can carry, by which an op finds the group; it lasts as long as the process."""
    if group not in _OPEN:
        _OPEN.append(group)
    return _OPEN.index(group)


def group_of(handle: int) -> Group:
    """The group of a handle. Raises LookupError for a number that is none."""
    if not 0 <= handle < len(_OPEN):
        raise LookupError(f"group {handle}: no group of ranks has this handle in this process; there are {len(_OPEN)}")
    return _OPEN[handle]


def group_of_ranks(handle: torch.Tensor, ranks: int) -> Group:
    """The group of a handle as ops are given it, int64 [1].

    Raises:
        LookupError: there is none.
        ValueError: it has not that number of ranks, which the graph was made for.
    """
    found = group_of(int(handle))
    if found.size != ranks:
        raise ValueError(f"group {int(handle)}: has {found.size} ranks; the graph was made for {ranks}")
    return found
