"""This process' place among those that serve together: every one opens the same pipeline and makes the same calls.

Rank 0 is the one that a request comes to and its result leaves from. What only it knows (whether the request has been
cancelled, what it made alone) the others hear over a control channel, in messages of JSON and safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from engines.profile import Ranks
from plugins.ranks import Group, ProcessGroup
from runtime.events import Cancellation, Cancelled

MOST_BYTES = 1 << 30
"""A message's size that is refused beyond: the largest request's rows take a tenth of it."""

PATIENCE = timedelta(days=365)
"""A rank waits for the next request as long as it takes. One that has died closes its connections; one that stands
still is the business of whoever watches the processes."""


class PeerFailed(RuntimeError):
    """What rank 0 did for all has failed there; the message says how."""


class Channel:
    """Small things between the ranks of one gloo group. All of them make the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def agree(self, answer: bool) -> bool:
        """Rank 0's answer, on every rank."""
        byte = torch.tensor([answer], dtype=torch.uint8)
        dist.broadcast(byte, group=self.group, group_src=0)
        return bool(byte.item())

    def broadcast(self, message: bytes) -> bytes:
        """Rank 0's message, on every rank; what the others give is not read.

        Raises ValueError, on every rank, for one of more than MOST_BYTES bytes.
        """
        length = torch.tensor([len(message)], dtype=torch.int64)
        dist.broadcast(length, group=self.group, group_src=0)
        size = int(length.item())
        if not 0 <= size <= MOST_BYTES:
            raise ValueError(f"message: {size} bytes between ranks, must be at most {MOST_BYTES}")
        content = torch.empty(size, dtype=torch.uint8)
        if self.rank == 0 and size:
            content.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        dist.broadcast(content, group=self.group, group_src=0)
        return content.numpy().tobytes()

    def tensors(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rank 0's tensors by name, on the CPU of every rank."""
        sent = safetensors.torch.save(_portable(named)) if self.rank == 0 else b""
        return safetensors.torch.load(self.broadcast(sent))


@dataclass(frozen=True)
class Peers:
    """One rank's groups. A stage is shared by the first ranks, as many as the profile gives it; the others wait.

    control: of all ranks, None for a process by itself. rows: of those that share the packed rows. tensors: of those
    that share the text encoder's tensors. tiles: of those that share the video decoder's tiles. The last three are None
    on a rank that has no part in the stage, and where one rank does it all.
    """

    control: Channel | None = None
    rows: Group | None = None
    tensors: Group | None = None
    tiles: Channel | None = None

    @classmethod
    def alone(cls) -> Peers:
        """A process that serves by itself."""
        return cls()

    @classmethod
    def join(cls, ranks: Ranks, group: Callable[[dist.ProcessGroup], Group] = ProcessGroup, backend: str = "") -> Peers:
        """The place of this process in torch's default group, which must be open; all of its ranks make this call.

        group: makes the groups that engines exchange over, of torch's `backend` ("": gloo). Raises ValueError when the
        profile's ranks are more than the processes.
        """
        size = dist.get_world_size()
        for stage, count in ranks:
            if count > size:
                raise ValueError(f"ranks.{stage} = {count}: there are {size} processes; start {count} of them")
        backend = backend or "gloo"
        rows = _first(ranks.ulysses, backend)
        tensors = _first(ranks.text_encoder, backend)
        tiles = _first(ranks.video_tiles, "gloo")
        return cls(
            Channel(_new(size, "gloo")),
            group(rows) if rows else None,
            group(tensors) if tensors else None,
            Channel(tiles) if tiles else None,
        )

    @property
    def rank(self) -> int:
        """This process' place, from 0."""
        return self.control.rank if self.control else 0

    @property
    def size(self) -> int:
        """How many processes serve together."""
        return self.control.size if self.control else 1

    @property
    def first(self) -> bool:
        """Whether requests come to this process and results leave from it."""
        return self.rank == 0

    def agreed(self, cancellation: Cancellation) -> Cancellation:
        """A cancellation that every rank asks at the same places, and that says what rank 0's does."""
        return cancellation if self.control is None else _Agreed(self.control, cancellation)

    def from_first(self, make: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What `make` gives on rank 0, where alone it is called, on the CPU of every rank.

        What it raises is raised on rank 0; on the others `Cancelled` where it was that, and else `PeerFailed`.
        """
        if self.control is None:
            return dict(make())
        if not self.first:
            _check(json.loads(self.control.broadcast(b"")))
            return self.control.tensors({})
        try:
            made = make()
        except Exception as error:
            self.control.broadcast(json.dumps(_told(error)).encode())
            raise
        self.control.broadcast(b"{}")
        return self.control.tensors(made)


class _Agreed(Cancellation):
    """Rank 0's cancellation, asked on every rank at the same places."""

    def __init__(self, control: Channel, cancellation: Cancellation) -> None:
        super().__init__(lambda: control.agree(cancellation.cancelled if control.rank == 0 else False))


def _told(error: Exception) -> dict[str, Any]:
    return {"cancelled" if isinstance(error, Cancelled) else "failed": f"{type(error).__name__}: {error}"}


def _check(outcome: dict[str, Any]) -> None:
    if "cancelled" in outcome:
        raise Cancelled(outcome["cancelled"])
    if "failed" in outcome:
        raise PeerFailed(f"rank 0: {outcome['failed']}")


def _portable(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Copies: safetensors refuses tensors that share memory.
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named.items()}


def _first(count: int, backend: str) -> dist.ProcessGroup | None:
    """The group of the first ranks; None for one rank, and on a rank that is not of them."""
    group = _new(count, backend) if count > 1 else None
    return group if dist.get_rank() < count else None


def _new(count: int, backend: str) -> dist.ProcessGroup:
    members: Sequence[int] = range(count)
    made: dist.ProcessGroup = dist.new_group(list(members), timeout=PATIENCE, backend=backend)
    return made
