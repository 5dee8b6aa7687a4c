"""Ranks that are threads of one process, which exchange by plain slices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass
class Meeting:
    """Where threads meet, each with something for all of them."""

    size: int
    given: dict[int, Sequence[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)

    def exchange(self, rank: int, mine: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """What every rank gives, in the order of ranks."""
        self.given[rank] = mine
        self.barrier.wait()
        all_given = [self.given[each] for each in range(self.size)]
        self.barrier.wait()
        return all_given


@dataclass(eq=False)
class ThreadGroup:
    """A `plugins.ranks.Group` of threads."""

    meeting: Meeting
    rank: int
    size: int

    def to_heads(self, parts: Sequence[torch.Tensor], rows: int) -> tuple[torch.Tensor, ...]:
        """All rows of this rank's heads."""
        whole = [torch.cat(each)[:rows] for each in zip(*self.meeting.exchange(self.rank, parts), strict=True)]
        return tuple(part.chunk(self.size, 1)[self.rank].clone() for part in whole)

    def to_rows(self, part: torch.Tensor, local_rows: int) -> torch.Tensor:
        """All heads of this rank's rows."""
        whole = torch.cat([given[0] for given in self.meeting.exchange(self.rank, [part])], 1)
        mine = whole[self.rank * local_rows : (self.rank + 1) * local_rows]
        return torch.cat([mine, mine.new_zeros(local_rows - len(mine), *mine.shape[1:])])

    def gather_rows(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """All rows."""
        return torch.cat([given[0] for given in self.meeting.exchange(self.rank, [part])])[:rows]

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all parts."""
        return torch.stack([given[0] for given in self.meeting.exchange(self.rank, [part])]).sum(0)


def on_threads(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What `work` returns on each of `size` ranks."""
    meeting = Meeting(size)
    groups = [ThreadGroup(meeting, rank, size) for rank in range(size)]

    def run(group: ThreadGroup) -> T:
        try:
            return work(group)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, groups))
