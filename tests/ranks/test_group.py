"""Groups of ranks that die, hang, speak out of turn or cannot meet: what is told, what is left, what works next."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime import frames
from runtime.events import Cancellation
from runtime.frames import MOST_BYTES, MOST_HEADER_BYTES, MOST_PARTS, Frame, FrameError
from runtime.rank_errors import GroupError, RankLost
from runtime.rank_place import Meeting, Place, see_one_gpu
from runtime.ranks import GroupSettings, RankGroup
from tests.ranks.processes import runs

FAKE = Path(__file__).parent / "fake_rank.py"
ROOT = Path(__file__).parents[2]
STALL_SECONDS = 3.0
UNITS = 200
PAUSE = 0.05
"""Together ten seconds, which no test waits for."""


def settings(folder: Path, **changes: Any) -> GroupSettings:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = GroupSettings((str(FAKE), str(folder)), 2, threads=1, stall=STALL_SECONDS, environment=environment)
    return replace(made, first_delay=0.05, longest_delay=0.2, **changes)


class Watched:
    """A group, what it has told, and the folder in which its ranks count their steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[str] = []
        self.group = RankGroup(settings(folder), self.told.append)

    def ask(self, cancellation: Cancellation | None = None, **header: Any) -> list[Frame]:
        return list(self.group.run(header, (b"one", b""), cancellation or Cancellation()))

    def steps(self, rank: int) -> int:
        return len((self.folder / f"steps{rank}").read_text().splitlines())

    def check_next(self) -> None:
        """The next command is done by ranks that are in step."""
        end = self.ask(units=2)[-1]
        assert (end.header["end"], end.header["sum"], end.parts) == ("done", 3.0, (b"one", b""))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    one = Watched(tmp_path_factory.mktemp("group"))
    with one.group:
        yield one
        pids = one.group.pids
    assert gone(pids)


def gone(pids: list[int]) -> bool:
    """Whether none of these processes runs, moments having passed."""
    return within(10, lambda: not any(map(runs, pids)))


def test_a_command_is_done_by_all_ranks_and_its_parts_come_back(watched: Watched) -> None:
    answer = watched.ask(units=2)
    assert [frame.header.get("unit") for frame in answer if "unit" in frame.header] == [0, 1]
    assert sum("event" in frame.header for frame in answer) == 2
    watched.check_next()
    assert watched.group.facts == {"weights": [100, 101]}


def test_a_cancelled_command_stops_before_the_same_step_on_all_ranks(watched: Watched) -> None:
    cancellation, answer = Cancellation(), []
    for frame in watched.group.run({"units": UNITS, "pause": PAUSE}, (), cancellation):
        answer.append(frame)
        if frame.header.get("unit") == 3:
            cancellation.cancel()
    assert answer[-1].header["end"] == "cancelled"
    assert watched.steps(0) == watched.steps(1) < UNITS / 2
    assert answer[-1].header["text"] == f"cancelled before unit {watched.steps(0)}"
    watched.check_next()


def test_an_answer_that_nobody_takes_to_its_end_is_cancelled(watched: Watched) -> None:
    with closing(watched.group.run({"units": UNITS, "pause": PAUSE}, (), Cancellation())) as answer:
        next(answer)
    assert watched.steps(0) == watched.steps(1) < UNITS / 2
    watched.check_next()


def test_a_refusal_is_told_with_all_its_parts_and_costs_no_rank(watched: Watched) -> None:
    before = watched.group.pids
    end = watched.ask(units=2, who="all", at=1, do="refuse")[-1].header
    assert (end["end"], end["field"], end["value"], end["nearest"]) == ("refused", "seed", "x", [1, 2])
    watched.check_next()
    assert watched.group.pids == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("kill", "rank 1 was ended by SIGKILL"),
        ("stop", "rank 1 has given no sign of life"),
        ("sleep", "no rank has moved for"),
        ("raise", "rank 1 ended with status 1: RuntimeError: out of luck"),
        ("garbage", "rank 1 was ended by SIGKILL: sent what is no message"),
    ],
)
def test_a_rank_that_is_lost_is_named_and_the_next_command_works(watched: Watched, wrong: str, told: str) -> None:
    before, restarts = watched.group.pids, watched.group.restarts
    outside = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    inside = {} if wrong in outside else {"who": 1, "at": 2, "do": wrong}
    answer = watched.group.run({"units": UNITS, "pause": PAUSE, **inside}, (), Cancellation())
    # Progress and a message of each of two units.
    list(itertools.islice(answer, 4))
    if wrong in outside:
        os.kill(before[1], outside[wrong])
    with pytest.raises(RankLost) as lost:
        list(answer)
    assert told in str(lost.value)
    if wrong == "sleep":
        assert "rank 1 (at " in str(lost.value)
        assert "rank 0" not in str(lost.value), "rank 0 waits for the other, and does not hang"
    # What it said of itself is for the log, and not for clients.
    public = lost.value.public
    assert (str(lost.value).startswith(public), "out of luck" in public, "no message" in public) == (True, False, False)
    assert gone(before)
    watched.check_next()
    assert watched.group.restarts == restarts + 1
    assert str(lost.value) in watched.told


def test_strangers_reach_no_rank_from_elsewhere_and_cost_nothing(watched: Watched) -> None:
    """Where ranks meet, and where gloo's connections begin, any process of this machine can knock."""
    before = watched.group.pids
    listening = [
        one.laddr
        for pid in before
        for one in psutil.Process(pid).net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.ip for address in listening} == {"127.0.0.1"}
    for address in listening:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\xff" * 4096):
            with suppress(OSError), socket.create_connection(address, timeout=5) as stranger:
                stranger.sendall(said)
    watched.check_next()
    assert watched.group.pids == before


def test_ranks_of_a_server_are_ended_by_it_alone(watched: Watched) -> None:
    """A signal to all processes of a server, which serves what it has accepted then, ends none of them."""
    before = watched.group.pids
    for pid in before:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    watched.check_next()
    assert watched.group.pids == before


def test_an_answer_that_is_taken_late_is_no_rank_that_hangs(watched: Watched) -> None:
    before = watched.group.pids
    with closing(watched.group.run({"units": 1}, (), Cancellation())) as answer:
        next(answer)
        time.sleep(STALL_SECONDS + 0.5)
        assert list(answer)[-1].header["end"] == "done"
    assert watched.group.pids == before


def test_a_start_for_which_there_is_no_room_is_tried_again(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr("runtime.ranks.RankProcess", _no_room)
        os.kill(watched.group.pids[0], signal.SIGKILL)
        assert within(60, lambda: lost(watched) == "lost: the ranks could not be started: no more processes")
    assert within(60, lambda: lost(watched) == "")
    watched.check_next()


def _no_room(*arguments: object) -> None:
    raise BlockingIOError("no more processes")


def test_closing_a_group_ends_what_waits_for_it(tmp_path: Path) -> None:
    group = RankGroup(settings(tmp_path)).start()
    answer = group.run({"units": UNITS, "pause": PAUSE}, (), Cancellation())
    next(answer)
    pids = group.pids
    group.close()
    with pytest.raises(RankLost, match="lost: the group has been closed"):
        list(answer)
    with pytest.raises(RankLost, match="lost: the group has been closed"):
        list(group.run({"units": 1}, (), Cancellation()))
    assert gone(pids)


def test_ranks_that_end_a_command_differently_are_out_of_step_and_lost(watched: Watched) -> None:
    with pytest.raises(RankLost, match="ended a command as done, refused, in their order"):
        # After the last exchange, where nobody waits for it.
        watched.ask(units=1, who=1, at=0, do="refuse", apart=True)
    watched.check_next()


def test_a_group_that_does_not_start_again_says_why_and_one_that_does_goes_on(watched: Watched) -> None:
    (watched.folder / "broken").touch()
    os.kill(watched.group.pids[0], signal.SIGKILL)
    reason = "rank 1 ended with status 1: RuntimeError: an engine is broken"
    assert within(60, lambda: reason in lost(watched))
    (watched.folder / "broken").unlink()
    assert within(60, lambda: lost(watched) == "")
    watched.check_next()


def lost(watched: Watched) -> str:
    """Why a command is lost; empty: it is not."""
    try:
        watched.ask(units=1)
    except RankLost as error:
        return str(error)
    return ""


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it holds, in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_no_rank_survives_its_server(tmp_path: Path) -> None:
    """Not even one that does not move, nor one in the middle of a command."""
    program = (
        "import sys, os; sys.path.insert(0, sys.argv[3])\n"
        "from pathlib import Path; from tests.ranks.test_group import *\n"
        "group = RankGroup(settings(Path(sys.argv[1]))).start()\n"
        "print(*group.pids, flush=True)\n"
        "list(group.run({'units': 1000, 'pause': 0.05}, (), Cancellation()))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), "-", str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pids = list(map(int, server.stdout.readline().split()))
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)
        server.kill()
    assert gone(pids)


def test_a_port_that_was_given_and_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        meeting = Meeting("127.0.0.1", port, 2)
        with pytest.raises(GroupError, match=f"cannot meet at 127.0.0.1:{port}.*MASTER_PORT"):
            RankGroup(settings(tmp_path, meeting=meeting)).start()
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_torchrun_starts_elsewhere_take_part_and_come_back_with_the_group(tmp_path: Path) -> None:
    """Both "machines" are this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "20"]
    other = [str(FAKE), str(tmp_path), "1", "2", f"127.0.0.1:{port}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*torchrun, *other], env=environment, start_new_session=True) as node:
        try:
            here = settings(tmp_path, meeting=Meeting("127.0.0.1", port, 1))
            with RankGroup(here) as group:
                assert group.facts == {"weights": [100, 101]}
                assert list(group.run({"units": 2}, (), Cancellation()))[-1].header["sum"] == 3.0
                os.kill(group.pids[0], signal.SIGKILL)
                assert within(60, lambda: group.restarts == 1)
                assert list(group.run({"units": 2}, (), Cancellation()))[-1].header["sum"] == 3.0
        finally:
            os.killpg(node.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "x", "LOCAL_WORLD_SIZE": "2"}, "MASTER_PORT: got 'x'"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "65536", "LOCAL_WORLD_SIZE": "2"}, "must be from 1 to 65535"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, "LOCAL_WORLD_SIZE: got ''"),
    ],
)
def test_where_ranks_meet_is_read_as_torchrun_has_it(variables: dict[str, str], error: str) -> None:
    with pytest.raises(GroupError, match=error):
        Meeting.of(variables)
    assert Meeting.of({}) == Meeting("127.0.0.1", 0, 0)
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
    assert Meeting.of(given) == Meeting("10.0.0.1", 29500, 2)


def test_a_rank_of_another_machine_counts_from_the_ranks_before_it() -> None:
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    place = Place.of(torchrun, first=2, size=4, meet="10.0.0.1:29500")
    assert (place.rank, place.size, place.local, place.address, place.port) == (3, 4, 1, "10.0.0.1", 29500)
    with pytest.raises(GroupError, match="rank 4: must be below 4"):
        Place.of(torchrun, first=3, size=4, meet="10.0.0.1:29500")


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, "1"), ("4,6", "6"), ("GPU-a,GPU-b", "GPU-b"), ("4", ""), ("", "")]
)
def test_a_rank_sees_the_gpu_of_its_number_among_those_that_it_may_see(visible: str | None, seen: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    see_one_gpu(1, environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == seen


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_messages_come_as_they_were_sent_and_the_stream_ends(line: tuple[socket.socket, socket.socket]) -> None:
    sent = Frame({"text": "ü", "nested": {"list": [1, None]}}, (b"", b"x" * 100_000))
    sender = threading.Thread(target=frames.write, args=(line[0], sent))
    sender.start()
    found = frames.read(line[1])
    assert found is not None
    assert (found.header, found.parts) == (sent.header, sent.parts)
    sender.join()
    line[0].close()
    assert frames.read(line[1]) is None


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "mark"),
        (b"h3r1" + (MOST_HEADER_BYTES + 1).to_bytes(4, "little"), "at most"),
        (b"h3r1\x02\x00\x00\x00[]", "must be JSON"),
        (b"h3r1\x05\x00\x00\x00\xff\xfe{}}", "must be JSON"),
        (b"h3r1\xff\x00\x00\x00{}", "ended after 2 of 255"),
        (b"h3", "ended after 2 of"),
    ],
)
def test_what_is_no_message_is_refused(raw: bytes, error: str, line: tuple[socket.socket, socket.socket]) -> None:
    line[0].sendall(raw)
    line[0].close()
    with pytest.raises(FrameError, match=error):
        frames.read(line[1])


@pytest.mark.parametrize(
    "lengths", ["[-1]", "[1.5]", f"[{MOST_BYTES + 1}]", f"{[0] * (MOST_PARTS + 1)}", f"[{MOST_BYTES}, 1]", "[true]"]
)
def test_too_much_is_refused_before_memory_is_taken_for_it(
    lengths: str, line: tuple[socket.socket, socket.socket]
) -> None:
    text = f'{{"header": {{}}, "parts": {lengths}}}'.encode()
    line[0].sendall(b"h3r1" + len(text).to_bytes(4, "little") + text)
    with pytest.raises(FrameError, match="parts: "):
        frames.read(line[1])


def test_too_much_is_not_sent_either(watched: Watched) -> None:
    parts = (b"",) * (MOST_PARTS + 1)
    with pytest.raises(FrameError, match="parts: "):
        list(watched.group.run({"units": 1}, parts, Cancellation()))
    with pytest.raises(FrameError, match="header: "):
        list(watched.group.run({"units": 1, "text": "x" * MOST_HEADER_BYTES}, (), Cancellation()))
    watched.check_next()
