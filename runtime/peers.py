"""This process' place among those that serve together: every one opens the same pipeline and makes the same calls.

Rank 0 is the one that a request comes to and its result leaves from. What only it knows (whether the request has been
cancelled, what it made alone) the others hear over a control channel, in messages of JSON and safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import safetensors.torch
import torch
import torch.distributed as dist

from engines.profile import ONE_RANK, Ranks
from plugins.ranks import Group, ProcessGroup
from runtime.events import Cancellation, Cancelled
from runtime.frames import MOST_BYTES
from runtime.tile_shares import TileGroup

PATIENCE = timedelta(days=365)
"""A rank waits for the next request as long as it takes. One that has died closes its connections; one that stands
still is the business of whoever watches the processes."""


GLOO = "gloo"
"""Torch's collectives between CPUs."""

_T = TypeVar("_T")


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
        sent = portable(named) if self.rank == 0 else b""
        return safetensors.torch.load(self.broadcast(sent))


@dataclass(frozen=True)
class Peers:
    """One rank's groups. A stage is shared by the first ranks, as many as the profile gives it; the others wait.

    ranks: how many share each stage. control: of all ranks, None for a process by itself. rows: of those that share the
    packed rows. tensors: of those that share the text encoder's tensors. row_control and tensor_control: the same
    ranks, for what they agree on. tiles: of those that share the video decoder's tiles. The groups of a stage are None
    on a rank that has no part in it, and where one rank does it all.
    """

    ranks: Ranks
    control: Channel | None = None
    rows: Group | None = None
    row_control: Channel | None = None
    tensors: Group | None = None
    tensor_control: Channel | None = None
    tiles: TileGroup | None = None

    @classmethod
    def alone(cls) -> Peers:
        """A process that serves by itself."""
        return cls(ONE_RANK)

    @classmethod
    def join(
        cls, ranks: Ranks, group: Callable[[dist.ProcessGroup], Group] = ProcessGroup, backend: str = GLOO
    ) -> Peers:
        """The place of this process in torch's default group, which must be open; all of its ranks make this call.

        group: makes the groups that engines exchange over, of torch's `backend`. Raises ValueError when the profile's
        ranks are more than the processes.
        """
        size = dist.get_world_size()
        for stage, count in ranks:
            if count > size:
                raise ValueError(f"ranks.{stage} = {count}: there are {size} processes; start {count} of them")
        # Every rank opens every group, in this order.
        return cls(
            ranks=ranks,
            control=Channel(_new(size)),
            rows=_first(ranks.ulysses, group, backend),
            row_control=_first(ranks.ulysses, Channel),
            tensors=_first(ranks.text_encoder, group, backend),
            tensor_control=_first(ranks.text_encoder, Channel),
            tiles=_tiles(ranks.video_tiles, backend),
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

    @staticmethod
    def agreed(cancellation: Cancellation, channel: Channel | None) -> Cancellation:
        """A cancellation that all ranks of a channel ask at the same places, and that says what rank 0's does."""
        return cancellation if channel is None else _Agreed(channel, cancellation)

    def from_first(
        self, make: Callable[[], Mapping[str, torch.Tensor]], together: bool = False
    ) -> dict[str, torch.Tensor]:
        """What `make` gives on rank 0, on the CPU of every rank. It is called there, and on those that say `together`.

        What it raises on rank 0 is raised there; on the others then `Cancelled` where it was that, and else
        `PeerFailed`. What it raises on another rank alone has rank 0 wait for that rank: the process must end.
        """
        if self.control is None:
            return dict(make())
        if not self.first:
            if together:
                with suppress(Cancelled):
                    make()
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
    """Rank 0's cancellation, asked on every rank of a channel at the same places: before units, and never within."""

    def __init__(self, channel: Channel, cancellation: Cancellation) -> None:
        super().__init__(lambda: channel.agree(channel.rank == 0 and cancellation.cancelled))

    def raise_within(self, before: str) -> None:
        """Nothing: ranks that exchange within a unit do not stop there."""


def _told(error: Exception) -> dict[str, Any]:
    return {"cancelled" if isinstance(error, Cancelled) else "failed": f"{type(error).__name__}: {error}"}


def _check(outcome: dict[str, Any]) -> None:
    if "cancelled" in outcome:
        raise Cancelled(outcome["cancelled"])
    if "failed" in outcome:
        raise PeerFailed(f"rank 0: {outcome['failed']}")


def portable(named: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors by name as safetensors has them."""
    # Copies: safetensors refuses tensors that share memory.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named.items()}
    return safetensors.torch.save(copies)


def _first(count: int, kind: Callable[[dist.ProcessGroup], _T], backend: str = GLOO) -> _T | None:
    """The group of the first ranks; None for one rank, and on a rank that is not of them."""
    if count == 1:
        return None
    group = _new(count, backend)
    return kind(group) if dist.get_rank() < count else None


def _tiles(count: int, backend: str) -> TileGroup | None:
    """The first ranks as those that share tiles, which NCCL carries from GPU to GPU."""
    control = _first(count, _itself)
    data = None if backend == GLOO else _first(count, _itself, backend)
    return None if control is None else TileGroup(control, data)


def _itself(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return group


def _new(count: int, backend: str = GLOO) -> dist.ProcessGroup:
    made: dist.ProcessGroup = dist.new_group(list(range(count)), timeout=PATIENCE, backend=backend)
    return made
