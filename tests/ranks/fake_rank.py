"""A rank that runs no engine: its steps are sums over all ranks, and it goes wrong as it is told to."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from engines.profile import Ranks
from plugins.ranks import ProcessGroup
from runtime.events import Cancellation, Event
from runtime.frames import Frame
from runtime.peers import Peers
from runtime.rank_place import SOCKET_VARIABLE, Place
from runtime.rank_worker import Send, work
from runtime.refusal import RequestError

FOLDER = Path(sys.argv[1])


class FakeService:
    """Commands: `units`, `pause` (seconds) and, at unit `at` of rank `who`, `do`; if `apart`, behind all units."""

    def __init__(self) -> None:
        size = dist.get_world_size()
        self._peers = Peers.join(Ranks(ulysses=size, text_encoder=1, video_tiles=1))
        self._group = ProcessGroup(dist.new_group())
        # Like a large engine.
        if (FOLDER / "slow").exists():
            time.sleep(3600)
        # Broken as an engine would be that cannot be opened.
        if (FOLDER / "broken").exists() and self._peers.rank == 1:
            raise RuntimeError("an engine is broken")

    def facts(self) -> Mapping[str, int]:
        return {"weights": 100 + self._peers.rank}

    def run(self, command: Frame, send: Send, progress: Callable[[Event], None], cancellation: Cancellation) -> Frame:
        header, rank = command.header, self._peers.rank
        agreed = self._peers.agreed(cancellation, self._peers.control)
        total, units = 0.0, header.get("units", 1)
        with (FOLDER / f"steps{rank}").open("w") as steps:
            for unit in range(units):
                agreed.raise_if_cancelled(f"unit {unit}")
                if header.get("who") in (rank, "all") and unit == header["at"] and not header.get("apart"):
                    self._go_wrong(header["do"])
                time.sleep(header.get("pause", 0.0))
                total = self._group.sum(torch.full((1,), float(rank + 1))).item()
                steps.write(f"{unit}\n")
                steps.flush()
                progress(Event("denoise", unit + 1, units, 0.0))
                send(Frame({"unit": unit}))
        if header.get("apart") and header["who"] == rank:
            self._go_wrong(header["do"])
        return Frame({"sum": total}, command.parts)

    def _go_wrong(self, how: str) -> None:
        if how == "sleep":
            time.sleep(3600)
        elif how == "raise":
            raise RuntimeError("out of luck")
        elif how == "refuse":
            raise RequestError("seed", "x", "must be another", (1, 2))
        elif how == "garbage":
            os.write(int(os.environ[SOCKET_VARIABLE]), b"no message at all")
            time.sleep(3600)


if __name__ == "__main__":
    # Started by torchrun: the first rank, how many there are, and where to meet.
    others = (int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]) if len(sys.argv) > 2 else ()
    work(Place.of(os.environ, *others), FakeService)
