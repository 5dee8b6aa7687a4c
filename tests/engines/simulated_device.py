"""A device whose queues run in any order that its events allow, so that a missing event shows as wrong data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Point:
    """An event: passed once the operations queued before it on its queue are done."""

    queue: Queue
    position: int

    @property
    def passed(self) -> bool:
        return self.queue.done >= self.position


@dataclass(eq=False)
class Queue:
    """Operations in order; one that waits for a point holds up those behind it."""

    operations: list[tuple[list[Point], Callable[[], None]]] = field(default_factory=list)
    done: int = 0

    def add(self, after: list[Point], operation: Callable[[], None]) -> Point:
        self.operations.append((after, operation))
        return Point(self, len(self.operations))

    @property
    def ready(self) -> bool:
        return self.done < len(self.operations) and all(p.passed for p in self.operations[self.done][0])

    def step(self) -> None:
        self.operations[self.done][1]()
        self.done += 1


class SimulatedDevice:
    """Implements `residency.Device`; `choose` picks which of the queues that could go on does so, and how far."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose
        self._compute, self._copies = Queue(), Queue()
        self._waiting: list[Point] = []
        self.allocated: list[torch.Tensor] = []
        self.log: list[tuple[str, object]] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = torch.full((nbytes,), 255, dtype=torch.uint8)
        self.allocated.append(memory)
        return memory

    def pin(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 254, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after: Point) -> Point:
        def operation() -> None:
            destination.copy_(source)
            self.log.append(("copied", (destination.data_ptr(), int(source[0]))))

        point = self._copies.add([after], operation)
        self._drift()
        return point

    def computed(self) -> Point:
        return Point(self._compute, len(self._compute.operations))

    def compute_after(self, event: Point) -> None:
        self._waiting.append(event)

    def compute(self, operation: Callable[[], None]) -> None:
        self._compute.add(self._waiting, operation)
        self._waiting = []
        self._drift()

    def finish(self, event: Point) -> None:
        while not event.passed:
            self._step()

    @property
    def copying(self) -> bool:
        """Whether a copy is queued that has not been made."""
        return self._copies.done < len(self._copies.operations)

    def drain(self) -> None:
        """Runs everything that is queued."""
        while any(queue.done < len(queue.operations) for queue in (self._compute, self._copies)):
            self._step()

    def _drift(self) -> None:
        """Runs some operations, or none."""
        for _ in range(self._choose(4)):
            if self._compute.ready or self._copies.ready:
                self._step()

    def _step(self) -> None:
        ready = [queue for queue in (self._compute, self._copies) if queue.ready]
        assert ready, "the queues wait for each other"
        ready[self._choose(len(ready))].step()
