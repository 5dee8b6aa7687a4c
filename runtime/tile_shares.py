"""Decoder tiles dealt to ranks: whoever is free decodes the next one, and rank 0 takes them in order.

Nobody's share is fixed. Rank 0 has the soundtrack to decode, the tiles to stitch and the frames to hand on, so it
decodes fewer tiles: those that it comes to while the one that it wants next is not there. No rank waits for another at
the end of a chunk; how far all run ahead is bounded by what rank 0 may hold.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
import torch.distributed as dist

from plugins.tiling import TILES_AHEAD
from runtime.decode import DecodeNumber
from runtime.events import Cancellation

IN_FLIGHT = 2
"""Tiles that a rank has been asked for: it decodes one while the one before is on its way."""

END = -1
"""Asked for instead of a tile when there are no more."""

MOST_TEXT = 8000
"""Bytes of a failure's text that are told."""

POLL_SECONDS = 0.05
"""Between looks at the cancellation while rank 0 waits for a tile."""

DEALER_THREAD = "h3-tiles"

_Sending = tuple[dist.Work, torch.Tensor]
"""A tensor on its way, which must live until it has arrived."""


class TileFailed(RuntimeError):
    """A tile has failed on a rank; the message says which rank, and how."""


class TileGroup:
    """The ranks that share tiles. While rank 0 deals, each of the others serves it."""

    def __init__(self, control: dist.ProcessGroup, data: dist.ProcessGroup | None = None) -> None:
        """control: a gloo group, for numbers. data: the same ranks, for tiles on their devices; None: on the CPU."""
        self.rank, self.size = dist.get_rank(control), dist.get_world_size(control)
        self._control, self._data = control, data
        # NCCL's groups are not for several threads at once. Nobody holds this for long: what is received is made.
        self._turn: AbstractContextManager[object] = threading.Lock() if data else nullcontext()
        self._streams = [torch.cuda.Stream() for _ in range(self.size)] if data else []
        """Of what comes from each rank: what this one computes meanwhile does not wait for it."""
        self._meet()

    def _meet(self) -> None:
        """Has NCCL connect rank 0 with each other rank, which it does at the first message; not while ranks compute."""
        for rank in range(1, self.size) if self._data else ():
            word = torch.zeros(1, device="cuda")
            if self.rank == 0:
                dist.recv(word, group=self._data, group_src=rank)
            elif self.rank == rank:
                dist.send(word, group=self._data, group_dst=0)
            torch.cuda.synchronize()

    def serve(self, decode: DecodeNumber) -> None:
        """Decodes the tiles that rank 0 asks for, by their numbers, until it wants no more.

        What `decode` raises is told to rank 0, and does not end this. Raises RuntimeError when rank 0 is lost.
        """
        answers: deque[list[_Sending]] = deque()
        while (number := self._number_from(0)) != END:
            if len(answers) == IN_FLIGHT:
                _finish(answers.popleft())
            answers.append(self._answer(decode, number))
        for answer in answers:
            _finish(answer)

    def ask(self, rank: int, number: int) -> None:
        """Asks a rank for a tile, or for none any more."""
        dist.send(torch.tensor([number]), group=self._control, group_dst=rank)

    def result(self, rank: int, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """The first tile that a rank was asked for and has not given, float32. Raises TileFailed where it has none."""
        if length := self._number_from(rank):
            text = torch.empty(min(length, MOST_TEXT), dtype=torch.uint8)
            dist.recv(text, group=self._control, group_src=rank)
            raise TileFailed(f"rank {rank}: {text.numpy().tobytes().decode(errors='replace')}")
        if not self._data:
            tile = torch.empty(tuple(shape))
            dist.recv(tile, group=self._control, group_src=rank)
            return tile.to(device)
        stream = self._streams[rank]
        with self._turn, torch.cuda.stream(stream):
            tile = torch.empty(tuple(shape), device=device)
            dist.recv(tile, group=self._data, group_src=rank)
        # Its memory is free again when the stream that stitches is done with it.
        tile.record_stream(torch.cuda.default_stream(device))
        stream.synchronize()
        return tile

    def _number_from(self, rank: int) -> int:
        number = torch.empty(1, dtype=torch.int64)
        dist.recv(number, group=self._control, group_src=rank)
        return int(number.item())

    def _answer(self, decode: DecodeNumber, number: int) -> list[_Sending]:
        """Begins to send how many bytes a failure's text has, and the text; or 0, and the tile."""
        try:
            tile = decode(number).contiguous()
        except Exception:
            text = traceback.format_exc().encode()[-MOST_TEXT:]
            told = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            return [_send(torch.tensor([len(told)]), self._control), _send(told, self._control)]
        header = _send(torch.tensor([0]), self._control)
        return [header, _send(tile, self._data) if self._data else _send(tile.cpu(), self._control)]


class DealtTiles:
    """Rank 0's side of one video: within its context the other ranks decode, and calling it gives all tiles in order.

    Leaving the context ends their work, whatever has happened, within the tiles that they have been asked for.
    """

    def __init__(self, group: TileGroup, count: int, shape: Sequence[int], device: torch.device) -> None:
        """Of `count` tiles of that shape, on a device. At most TILES_AHEAD for each rank are ahead of their turn."""
        self._group, self._count, self._shape, self._device = group, count, tuple(shape), device
        self._window = TILES_AHEAD * group.size
        self._changed = threading.Condition()
        self._next = self._wanted = 0
        self._ready: dict[int, torch.Tensor] = {}
        self._failure: Exception | None = None
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._deal, args=(rank,), name=DEALER_THREAD) for rank in range(1, group.size)
        ]

    def __enter__(self) -> DealtTiles:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._ready.clear()
        # Its traceback leads here: they would keep each other alive.
        self._failure = None

    def __call__(self, count: int, decode: DecodeNumber, cancellation: Cancellation) -> Iterator[torch.Tensor]:
        """A `TileOrder`. Raises TileFailed, what connections to ranks raise, and what `decode` raises here."""
        if count != self._count:
            raise ValueError(f"count: {count} tiles are wanted, {self._count} are dealt")
        for number in range(count):
            while not self._is_ready(number):
                cancellation.raise_if_cancelled(f"decoder tile {number + 1} of {count}")
                if (own := self._take(wait=False)) is not None:
                    self._keep(own, decode(own))
            yield self._passed_on(number)

    def _is_ready(self, number: int) -> bool:
        """Whether a tile has come; waits a little for it where no other is left to decode. Raises what has failed."""
        with self._changed:
            if number not in self._ready and not self._may_take() and self._failure is None:
                self._changed.wait(POLL_SECONDS)
            if self._failure is not None:
                raise self._failure
            return number in self._ready

    def _passed_on(self, number: int) -> torch.Tensor:
        with self._changed:
            self._wanted = number + 1
            self._changed.notify_all()
            return self._ready.pop(number)

    def _keep(self, number: int, tile: torch.Tensor) -> None:
        with self._changed:
            self._ready[number] = tile
            self._changed.notify_all()

    def _may_take(self) -> bool:
        return self._next < min(self._count, self._wanted + self._window)

    def _take(self, wait: bool) -> int | None:
        """The next tile's number; None where there is none, or, without waiting, none yet."""
        with self._changed:
            while wait and not (self._stopped or self._next == self._count or self._may_take()):
                self._changed.wait()
            if self._stopped or not self._may_take():
                return None
            self._next += 1
            return self._next - 1

    def _deal(self, rank: int) -> None:
        """Keeps one rank at work; in a thread of its own, as rank 0 has work of its own too."""
        asked: deque[int] = deque()
        try:
            while self._ask_for_more(rank, asked):
                self._receive(rank, asked.popleft())
            self._group.ask(rank, END)
        except Exception as error:
            self._fail(error)

    def _ask_for_more(self, rank: int, asked: deque[int]) -> bool:
        """Whether the rank is asked for any tile."""
        while len(asked) < IN_FLIGHT and (number := self._take(wait=not asked)) is not None:
            self._group.ask(rank, number)
            asked.append(number)
        return bool(asked)

    def _receive(self, rank: int, number: int) -> None:
        try:
            self._keep(number, self._group.result(rank, self._shape, self._device))
        except TileFailed as failure:
            # The rank goes on: what else it was asked for is still to come from it.
            self._fail(failure)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._stopped = True
            self._changed.notify_all()


def _send(tensor: torch.Tensor, group: dist.ProcessGroup) -> _Sending:
    work = dist.isend(tensor, group=group, group_dst=0)
    assert work is not None  # this rank is of the group
    return work, tensor


def _finish(sendings: Sequence[_Sending]) -> None:
    for work, _ in sendings:
        work.wait()
