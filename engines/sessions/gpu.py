"""The GPU as the TensorRT back ends see it: memory, a queue that computes, a queue that copies."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from engines.sessions.residency import Device, Event

QUEUED = 2
"""Runs that may wait for the GPU at once."""


class PinError(RuntimeError):
    """Host memory cannot be pinned; says how much, and what to change."""


class Gpu(Device, Protocol):
    """A residency device that also says where tensors are, and which queue computes."""

    @property
    def device(self) -> torch.device:
        """Where tensors are made."""

    def computing(self) -> AbstractContextManager[int]:
        """Within it, work is queued on the stream whose handle it gives, in turn with what callers' streams do."""

    def trim(self) -> None:
        """Gives memory that no tensor uses back to the system, for other processes."""

    def describe(self) -> str:
        """What it is, for error messages."""


class RunQueue:
    """The runs that wait for a GPU: enough to keep it busy, few enough for a cancelled request to stop soon."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._ends: deque[Event] = deque()

    def add(self) -> None:
        """A run has been queued; waits for the oldest one where that makes more than QUEUED."""
        self._ends.append(self._gpu.computed())
        if len(self._ends) > QUEUED:
            self._gpu.finish(self._ends.popleft())

    def clear(self) -> None:
        """Whoever waits for the GPU itself need not wait for these."""
        self._ends.clear()


class CudaGpu:
    """One of this process' GPUs, with a stream of its own for computing and one for copies.

    TensorRT must not compute on the default stream, where it waits for the whole device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._computes, self._copies = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @contextmanager
    def computing(self) -> Iterator[int]:
        """Makes the computing stream torch's current one, after what the caller has queued and before what it will."""
        caller = torch.cuda.current_stream(self.device)
        self._computes.wait_stream(caller)
        try:
            with torch.cuda.stream(self._computes):
                yield self._computes.cuda_stream
        finally:
            caller.wait_stream(self._computes)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8 [nbytes], at a multiple of 512 bytes."""
        with torch.cuda.stream(self._computes):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pin(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, uint8 [nbytes].

        Of just that size: torch's own allocator would round it up to a power of two.

        Raises:
            PinError: the system does not let so much be pinned.
        """
        memory = torch.empty(nbytes, dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if code:
            raise PinError(
                f"{nbytes:,} bytes of host memory cannot be pinned (CUDA error {code}); "
                "lower the profile's memory, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
        return memory

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Queues a copy on the copying stream."""
        self._copies.wait_event(after)
        with torch.cuda.stream(self._copies):
            destination.copy_(source, non_blocking=True)
        return self._copies.record_event()

    def computed(self) -> torch.cuda.Event:
        """The end of what is queued on the computing stream."""
        return self._computes.record_event()

    def compute_after(self, event: torch.cuda.Event) -> None:
        """Keeps the computing stream waiting."""
        self._computes.wait_event(event)

    def finish(self, event: torch.cuda.Event) -> None:
        """Waits for an event."""
        event.synchronize()

    def trim(self) -> None:
        """Empties torch's cache of device memory, once what uses it is done."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def describe(self) -> str:
        """Name and compute capability."""
        properties = torch.cuda.get_device_properties(self.device)
        return f"{properties.name} with compute capability {properties.major}.{properties.minor}"
