"""Streaming weights: whatever order the device's queues run in, every computation reads its own unit's bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.sessions.residency import SLOTS, DeviceWeights, HostWeights, Staging, kept_within, spread
from tests.engines.simulated_device import SimulatedDevice


class Numbered:
    """Unit i is `sizes[i]` bytes, all of value i."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.reads: list[int] = []

    def read(self, unit: int, destination: torch.Tensor) -> None:
        assert len(destination) == self.sizes[unit]
        self.reads.append(unit)
        destination.fill_(unit)


class Bench:
    """One component's weights on a simulated device."""

    def __init__(self, sizes: Sequence[int], resident: int, kept: int, choose: st.DrawFn | None = None) -> None:
        self.device = SimulatedDevice(choose or (lambda count: count - 1))
        self.source = Numbered(sizes)
        self.host = HostWeights(self.device, self.source, Staging(self.device, max(sizes)), range(kept))
        self.resident = spread(resident, len(sizes))
        self.weights = DeviceWeights(self.device, self.host, self.resident)
        self.seen: list[tuple[int, torch.Tensor]] = []

    def use(self, unit: int) -> None:
        """Queues a computation that reads the unit, as an engine would."""
        memory = self.weights.acquire(unit)

        def read() -> None:
            self.seen.append((unit, memory.clone()))
            self.device.log.append(("read", (memory.data_ptr(), unit)))

        self.device.compute(read)
        self.weights.release(unit)

    def check(self) -> None:
        """Every computation that ran has read its unit whole."""
        self.device.drain()
        for unit, read in self.seen:
            assert read.tolist() == [unit] * self.source.sizes[unit]


@st.composite
def benches(draw: st.DrawFn) -> Bench:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    order = draw(st.randoms(use_true_random=False))
    resident, kept = draw(st.integers(0, len(sizes))), draw(st.integers(0, len(sizes)))
    return Bench(sizes, resident, kept, lambda count: order.randrange(count))


@settings(deadline=None, max_examples=300)
@given(benches(), st.integers(1, 4), st.integers(1, 3))
def test_every_run_sees_its_own_weights_in_any_interleaving(bench: Bench, steps: int, runs: int) -> None:
    for _ in range(steps):
        for unit in range(len(bench.source.sizes)):
            for _ in range(runs):
                bench.use(unit)
    bench.check()
    assert len(bench.seen) == steps * runs * len(bench.source.sizes)


@settings(deadline=None, max_examples=200)
@given(benches(), st.lists(st.integers(0, 1000), max_size=20))
def test_units_may_be_used_in_any_order(bench: Bench, order: list[int]) -> None:
    for number in order:
        bench.use(number % len(bench.source.sizes))
    bench.check()


@settings(deadline=None, max_examples=200)
@given(benches(), st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=12))
def test_freeing_in_between_loses_nothing(bench: Bench, order: list[tuple[int, bool]]) -> None:
    for number, resident in order:
        bench.use(number % len(bench.source.sizes))
        bench.weights.free(resident)
        # The allocator may hand freed memory to what computes next, for which a copy on another queue does not wait.
        assert not (resident and bench.device.copying)
    bench.check()


@settings(deadline=None, max_examples=200)
@given(benches(), st.integers(1, 3))
def test_device_memory_keeps_to_what_was_promised(bench: Bench, steps: int) -> None:
    for _ in range(steps):
        for unit in range(len(bench.source.sizes)):
            bench.use(unit)
    streamed = [size for unit, size in enumerate(bench.source.sizes) if unit not in bench.resident]
    resident = sum(bench.source.sizes) - sum(streamed)
    slots = min(SLOTS, len(streamed)) * max(streamed, default=0)
    assert sum(len(memory) for memory in bench.device.allocated) == resident + slots


@pytest.mark.parametrize("resident", [0, 3, 4])
def test_the_next_streamed_units_are_copied_once_each_and_wrap_around_to_the_next_step(resident: int) -> None:
    units, steps = 7, 3
    bench = Bench([4] * units, resident, kept=0)
    streamed = [unit for unit in range(units) if unit not in spread(resident, units)]
    for _ in range(steps):
        for unit in range(units):
            bench.use(unit)
            ahead = bench.weights.upcoming(unit)
            assert ahead[0] == min((u for u in streamed if u >= unit), default=streamed[0])
            assert {slot.unit for slot in bench.weights._slots} == set(ahead)
    reads = [unit for unit in bench.source.reads if unit in streamed]
    # Every step copies each streamed unit once; the last step has begun with the next one's.
    assert reads == (streamed * (steps + 1))[: len(reads)]
    assert steps * len(streamed) <= len(reads) <= steps * len(streamed) + SLOTS


def test_copies_run_while_the_device_computes_and_never_further_ahead_than_the_slots() -> None:
    """The copy queue is always served first here, so that nothing but events holds it back."""
    bench = Bench([4] * 6, resident=0, kept=6, choose=lambda count: count - 1)
    for _ in range(2):
        for unit in range(6):
            bench.use(unit)
    bench.check()
    copied = read = 0
    for kind, _ in bench.device.log:
        copied, read = copied + (kind == "copied"), read + (kind == "read")
        assert copied <= read + SLOTS
    # While unit 0 was read, unit 1 was there: the first computation did not wait for a second copy, nor hold it up.
    assert [kind for kind, _ in bench.device.log][:3] in (["copied", "read", "copied"], ["copied", "copied", "read"])


def test_kept_units_are_read_once_and_others_each_time() -> None:
    bench = Bench([4] * 4, resident=0, kept=2)
    for _ in range(3):
        for unit in range(4):
            bench.use(unit)
    counts = {unit: bench.source.reads.count(unit) for unit in range(4)}
    assert counts[0] == counts[1] == 1
    assert min(counts[2], counts[3]) >= 3


def test_resident_units_survive_a_stage_and_swapped_ones_do_not() -> None:
    bench = Bench([4] * 3, resident=3, kept=0)
    for again, reads in ((False, 3), (True, 6)):
        for unit in range(3):
            bench.use(unit)
        bench.weights.free(resident=again)
        for unit in range(3):
            bench.use(unit)
        assert len(bench.source.reads) == reads
    bench.check()


def test_a_unit_whose_file_cannot_be_read_is_not_taken_for_loaded() -> None:
    bench = Bench([4] * 3, resident=0, kept=0)
    bench.use(0)
    read = bench.source.read

    def fail(unit: int, destination: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    bench.source.read = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is gone"):
        bench.use(2)
    bench.source.read = read  # type: ignore[method-assign]
    bench.use(2)
    bench.check()


@given(st.integers(0, 60), st.integers(1, 60))
def test_resident_units_are_spread_evenly(resident: int, units: int) -> None:
    chosen = sorted(spread(resident, units))
    assert len(chosen) == min(resident, units)
    if chosen:
        gaps = [b - a for a, b in zip(chosen, [*chosen[1:], chosen[0] + units], strict=True)]
        assert max(gaps) - min(gaps) <= 1
        assert max(gaps) == math.ceil(units / len(chosen))


def test_pinned_copies_keep_to_their_budget() -> None:
    assert kept_within(10, [4, 4, 4], [0, 1, 2]) == {0, 1}
    assert kept_within(10, [4, 4, 4], [2]) == {2}
    assert kept_within(3, [4, 4, 4], [0, 1, 2]) == frozenset()
