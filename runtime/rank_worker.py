"""The process of one rank: joins the others, opens its part of the engines, and does what the server tells rank 0.

`RankGroup` starts the ranks of one machine. Those of further machines are started there by torchrun (docs/ranks.md).
What a rank raises that is no refusal ends its process, and so the group, whose other ranks would wait for it for ever.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from engines.machine import DieWith
from runtime import allocation, frames
from runtime.frames import Frame
from runtime.rank_errors import GroupError
from runtime.rank_place import Place, see_one_gpu

if TYPE_CHECKING:
    from runtime.events import Cancellation, Event
    from runtime.peers import Channel

BEAT_SECONDS = 0.5
"""Between two signs of life."""

MEETING_SECONDS = 600.0
"""How long ranks wait for the others, which may be started later on other machines."""

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("engines", "plugins", "runtime")

_EXCHANGES = (
    "plugins/kernels/symmetric_exchange.py",
    "plugins/ranks.py",
    "runtime/peers.py",
    "runtime/tile_shares.py",
)
"""Who is in one of these waits for other ranks."""

Send = Callable[[Frame], None]
"""Takes a message for the server; on ranks other than 0 it goes nowhere."""


class Service(Protocol):
    """What a rank does. All ranks of a group do the same at the same time."""

    def facts(self) -> Mapping[str, int]:
        """Numbers of this rank that the server may know, of the same names on all ranks."""

    def run(self, command: Frame, send: Send, progress: Callable[[Event], None], cancellation: Cancellation) -> Frame:
        """Does a command; what it returns ends the answer. Raises RequestError and Cancelled, on all ranks."""


Open = Callable[[], Service]
"""Opens the service, torch's default group of all ranks being open."""


class Link:
    """A rank's line to its server. A rank whose server has gone ends at once, whatever it is doing."""

    def __init__(self, place: Place, main: int) -> None:
        """main: the identifier of the thread that works."""
        self.commands: queue.Queue[Frame] = queue.Queue()
        self._main = main
        self._moved = 0
        self._cancelled = 0
        self._sending = threading.Lock()
        self._stream = socket.socket(fileno=place.socket) if place.socket >= 0 else None
        if self._stream is not None:
            for task in (self._listen, self._beat):
                threading.Thread(target=task, daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Sends a message to the server, if this rank has one."""
        if self._stream is not None:
            with self._sending:
                frames.write(self._stream, frame)

    def move(self) -> None:
        """Counts a step, by which the server sees that this rank does not hang."""
        self._moved += 1

    def cancelled(self, number: int) -> bool:
        """Whether the server no longer wants the answer of this command."""
        return self._cancelled == number

    def _listen(self) -> None:
        assert self._stream is not None
        try:
            while (frame := frames.read(self._stream)) is not None:
                if "cancel" in frame.header:
                    self._cancelled = int(frame.header["cancel"])
                else:
                    self.commands.put(frame)
        except (OSError, ValueError):
            traceback.print_exc()
        finally:
            os._exit(1)

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(BEAT_SECONDS):
            at, waits = where(sys._current_frames().get(self._main))
            try:
                self.send(Frame({"beat": {"moved": self._moved, "at": at, "waits": waits}}))
            except OSError:
                os._exit(1)


def where(frame: FrameType | None) -> tuple[str, bool]:
    """The place in this project that a thread is at, as FILE:LINE FUNCTION, and whether it waits for other ranks there.

    frame: the thread's innermost.
    """
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and (name := path.relative_to(_ROOT)).parts[0] in _PACKAGES:
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}", str(name) in _EXCHANGES
        frame = frame.f_back
    return "", False


def work(place: Place, open_service: Open) -> None:
    """A rank's whole life. Returns never; ends the process with status 1 after what is no refusal of a request."""
    # Ctrl-C in a terminal reaches all processes of the foreground, as a supervisor's SIGTERM may: a server then still
    # serves what it has accepted, and ends its ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if place.parent:
        DieWith(place.parent)()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    see_one_gpu(place.local, os.environ)
    logging.basicConfig(format=f"rank {place.rank}: %(message)s")
    # How ranks exchange, and why.
    logging.getLogger("plugins").setLevel(logging.INFO)
    link = Link(place, threading.get_ident())
    try:
        _serve(place, link, open_service)
    except BaseException as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, GroupError) else f"{type(error).__name__}: {error}"
        try:
            link.send(Frame({"failed": text[:4000], "setting": isinstance(error, GroupError)}))
        finally:
            # Destructors of what other ranks share would wait for them.
            sys.stderr.flush()
            os._exit(1)


def _serve(place: Place, link: Link, open_service: Open) -> None:
    import torch.distributed as dist

    from runtime.peers import GLOO, PATIENCE, Channel

    _meet(place)
    service = open_service()
    control = Channel(dist.new_group(timeout=PATIENCE, backend=GLOO))
    facts = _gathered(control, service.facts())
    link.send(Frame({"ready": facts}))
    while True:
        command = _told(control, link)
        end = _done(service, command, link, control.rank)
        _check_same_end(control, end)
        if control.rank == 0:
            link.send(end)
        allocation.give_back()


def _meet(place: Place) -> None:
    """Opens torch's default group. Rank 0 has the listening socket of its server, which took a port that was free."""
    import torch.distributed as dist

    host, port, patience = place.address, place.port, timedelta(seconds=MEETING_SECONDS)
    if place.rank == 0:
        if place.listener < 0:
            raise GroupError("rank 0 is started by the server; torchrun starts those of other machines: --first-rank")
        store = dist.TCPStore(
            host, port, place.size, True, patience, wait_for_workers=False, master_listen_fd=place.listener
        )
    else:
        store = dist.TCPStore(host, port, place.size, False, patience, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=patience)


def _gathered(control: Channel, facts: Mapping[str, int]) -> dict[str, list[int]]:
    """Each number of all ranks, in their order."""
    import torch
    import torch.distributed as dist

    own = torch.tensor(list(facts.values()), dtype=torch.int64)
    every = [torch.empty_like(own) for _ in range(control.size)]
    dist.all_gather(every, own, group=control.group)
    return {name: [int(one[i]) for one in every] for i, name in enumerate(facts)}


def _told(control: Channel, link: Link) -> Frame:
    """The next command, on every rank as rank 0 got it."""
    if control.rank == 0:
        command = link.commands.get()
        link.move()
        control.broadcast(json.dumps({"header": command.header, "parts": len(command.parts)}).encode())
        for part in command.parts:
            control.broadcast(part)
        return command
    said = json.loads(control.broadcast(b""))
    return Frame(said["header"], tuple(control.broadcast(b"") for _ in range(said["parts"])))


def _done(service: Service, command: Frame, link: Link, rank: int) -> Frame:
    """How a command ends."""
    from runtime.events import Cancellation, Cancelled
    from runtime.peers import PeerFailed
    from runtime.refusal import RequestError

    number = command.header["number"]

    def progress(event: Event) -> None:
        link.move()
        if rank == 0:
            link.send(Frame({"event": event.to_json()}))

    send = link.send if rank == 0 else _nowhere
    link.move()
    try:
        made = service.run(command, send, progress, Cancellation(lambda: link.cancelled(number)))
        return Frame({**made.header, "end": "done"}, made.parts)
    except RequestError as error:
        return Frame({"end": "refused", **error_fields(error)})
    except Cancelled as error:
        return Frame({"end": "cancelled", "text": str(error)})
    except PeerFailed as error:
        # Rank 0 says what it was.
        return Frame({"end": "refused", "text": str(error)})


def _nowhere(frame: Frame) -> None:
    """Answers are rank 0's."""


def error_fields(error: Any) -> dict[str, Any]:
    """What a RequestError was made of, as JSON; values that JSON does not have are said as text."""
    from runtime.refusal import MISSING, show

    def plain(value: Any) -> Any:
        return value if value is None or type(value) in (str, int, float, bool) else show(value)

    nearest = error.nearest
    return {
        "field": error.field,
        "value": None if error.value is MISSING else plain(error.value),
        "missing": error.value is MISSING,
        "rule": error.rule,
        "nearest": [plain(one) for one in nearest] if isinstance(nearest, tuple) else plain(nearest),
    }


_ENDS = ("done", "refused", "cancelled")


def _check_same_end(control: Channel, end: Frame) -> None:
    """Raises RuntimeError unless a command has ended in the same way on all ranks: else they are not in step."""
    ends = _gathered(control, {"end": _ENDS.index(end.header["end"])})["end"]
    if len(set(ends)) > 1:
        raise RuntimeError(f"the ranks ended a command as {', '.join(_ENDS[one] for one in ends)}, in their order")


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m runtime.rank_worker`: a rank of an engine store."""
    parser = argparse.ArgumentParser(prog="python -m runtime.rank_worker", description="One rank of an engine store.")
    parser.add_argument("--store", required=True, type=Path, help="the engine store")
    parser.add_argument("--condition-cache", type=int, default=0, help="bytes of encoded prompts and references")
    parser.add_argument("--first-rank", type=int, default=0, help="of this machine, where torchrun starts the ranks")
    parser.add_argument("--ranks", type=int, default=0, help="of all machines; default: WORLD_SIZE")
    parser.add_argument("--meet", default="", help="HOST:PORT of rank 0; default: MASTER_ADDR and MASTER_PORT")
    chosen = parser.parse_args(arguments)
    try:
        place = Place.of(os.environ, chosen.first_rank, chosen.ranks, chosen.meet)
    except GroupError as error:
        parser.error(str(error))

    def opened() -> Service:
        from runtime.rank_service import PipelineService

        return PipelineService.open(chosen.store, chosen.condition_cache)

    work(place, opened)


if __name__ == "__main__":
    main()
