"""Weights on a device: which stay there, and how the others pass through a few slots while the device computes.

A unit is what is needed at once: all weights of one transformer layer, say. Units are used in order, over and over (a
denoising step after the other), so the next ones are known: while unit i computes, the next streamed unit is copied
into the slot that i does not occupy. Two queues of the device work side by side, one computes and one copies; events
keep a unit from being read before its copy has ended, and a slot from being written before its reader has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Event = Any
"""A point in one of a device's queues."""

SLOTS = 2
"""Units of a streamed component that are on the device at once: one is read while the next arrives."""


class Device(Protocol):
    """Memory and the two queues of a device. Methods that queue return at once."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8 [nbytes], that work queued for computing up to now may still be using."""

    def pin(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8 [nbytes], that copies read without the host's help."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Queues a copy for when `after` has passed; the event is its end."""

    def computed(self) -> Event:
        """The end of the computing that is queued by now."""

    def compute_after(self, event: Event) -> None:
        """Keeps what is queued for computing from now on waiting for an event."""

    def finish(self, event: Event) -> None:
        """Blocks the caller until an event has passed."""


class Source(Protocol):
    """Where units are read from."""

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each unit."""

    def read(self, unit: int, destination: torch.Tensor) -> None:
        """Writes a unit to host memory, uint8 of its size."""


class Staging:
    """Two pinned buffers through which units on their way to the device pass in turn."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._buffers: list[torch.Tensor] = []
        self._copied: list[Event] = [None, None]
        self._turn = 0

    def upload(self, source: Source, unit: int, destination: torch.Tensor, after: Event) -> Event:
        """Reads a unit and queues its copy. Waits until the last but one copy from here has ended."""
        if not self._buffers:
            self._buffers = [self._device.pin(self._nbytes) for _ in self._copied]
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        if self._copied[turn] is not None:
            self._device.finish(self._copied[turn])
        buffer = self._buffers[turn][: source.sizes[unit]]
        source.read(unit, buffer)
        self._copied[turn] = self._device.copy(destination, buffer, after)
        return self._copied[turn]


class HostWeights:
    """The host's side of some units: those of `kept` stay in pinned memory once read, the others are read each time."""

    def __init__(self, device: Device, source: Source, staging: Staging, kept: Collection[int]) -> None:
        self._device, self._source, self._staging = device, source, staging
        self._kept = frozenset(kept)
        self._pinned: dict[int, torch.Tensor] = {}

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each unit."""
        return self._source.sizes

    def upload(self, unit: int, memory: torch.Tensor, after: Event) -> Event:
        """Queues the copy of a unit to the beginning of device memory; the event is its end."""
        destination = memory[: self.sizes[unit]]
        if unit not in self._kept:
            return self._staging.upload(self._source, unit, destination, after)
        if unit not in self._pinned:
            self._pinned[unit] = self._device.pin(self.sizes[unit])
            self._source.read(unit, self._pinned[unit])
        return self._device.copy(destination, self._pinned[unit], after)


@dataclass
class _Place:
    """Device memory of one unit. `copied`: the end of the copy to it; `read`: when it may be written, as far as readers
    are concerned."""

    memory: torch.Tensor
    read: Event
    unit: int | None = None
    copied: Event = None


class DeviceWeights:
    """Units of one component on the device: `resident` ones each in a place of its own, the others in slots.

    Use a unit as `acquire`, queue what reads it, `release`; one at a time.
    """

    def __init__(self, device: Device, host: HostWeights, resident: Collection[int]) -> None:
        self._device, self._host = device, host
        self._resident = frozenset(resident)
        self._streamed = [unit for unit in range(len(host.sizes)) if unit not in self._resident]
        self._places: dict[int, _Place] = {}
        self._slots: list[_Place] = []

    def acquire(self, unit: int) -> torch.Tensor:
        """The unit's bytes on the device, for what is queued for computing until `release`."""
        place = self._resident_place(unit) if unit in self._resident else self._slot(unit)
        self._device.compute_after(place.copied)
        return place.memory[: self._host.sizes[unit]]

    def release(self, unit: int) -> None:
        """Says that what reads the unit this time is queued; then has the units to come copied meanwhile."""
        for slot in self._slots:
            if slot.unit == unit:
                slot.read = self._device.computed()
        self._prefetch(unit)

    def load_resident(self) -> None:
        """Has every resident unit copied to the device."""
        for unit in sorted(self._resident):
            self._resident_place(unit)

    def free(self, resident: bool) -> None:
        """Gives the slots' memory back, and that of the resident units if asked for, once nothing copies to it."""
        for place in self._slots:
            self._finish(place)
        self._slots = []
        if resident:
            for place in self._places.values():
                self._finish(place)
            self._places = {}

    def upcoming(self, unit: int) -> list[int]:
        """The streamed units that should be in slots while `unit` computes: the first ones from it on, in a circle."""
        later = [each for each in self._streamed if each >= unit]
        return (later + [each for each in self._streamed if each < unit])[: self._slot_count]

    @property
    def _slot_count(self) -> int:
        return min(SLOTS, len(self._streamed))

    @property
    def _slot_bytes(self) -> int:
        return max((self._host.sizes[unit] for unit in self._streamed), default=0)

    def _new(self, nbytes: int) -> _Place:
        memory = self._device.allocate(nbytes)
        return _Place(memory, read=self._device.computed())

    def _resident_place(self, unit: int) -> _Place:
        if unit not in self._places:
            place = self._new(self._host.sizes[unit])
            self._fill(place, unit)
            self._places[unit] = place
        return self._places[unit]

    def _slot(self, unit: int) -> _Place:
        """The slot that holds a unit; one that was not foreseen is loaded now."""
        found = next((slot for slot in self._slots if slot.unit == unit), None)
        return found or self._load(unit, self.upcoming(unit))

    def _prefetch(self, unit: int) -> None:
        wanted = self.upcoming(unit)
        held = {slot.unit for slot in self._slots}
        for each in wanted:
            if each not in held:
                self._load(each, wanted)

    def _load(self, unit: int, wanted: Sequence[int]) -> _Place:
        """Loads a unit into a slot that none of the wanted units is in."""
        if not self._slots:
            self._slots = [self._new(self._slot_bytes) for _ in range(self._slot_count)]
        slot = next(slot for slot in self._slots if slot.unit not in wanted)
        self._fill(slot, unit)
        return slot

    def _fill(self, place: _Place, unit: int) -> None:
        place.unit = None  # a failed upload leaves no unit behind
        place.copied = self._host.upload(unit, place.memory, after=place.read)
        place.unit = unit

    def _finish(self, place: _Place) -> None:
        if place.copied is not None:
            self._device.finish(place.copied)


def spread(resident: int, units: int) -> frozenset[int]:
    """Which of some units stay on the device when so many may: evenly between the others, so that copies have time."""
    resident = min(resident, units)
    return frozenset(i for i in range(units) if (i + 1) * resident // units > i * resident // units)


def kept_within(budget: int, sizes: Sequence[int], units: Collection[int]) -> frozenset[int]:
    """The first of those units that fit together in so many bytes of pinned host memory."""
    kept: list[int] = []
    for unit in sorted(units):
        budget -= sizes[unit]
        if budget < 0:
            break
        kept.append(unit)
    return frozenset(kept)
