"""Ranks that the models of a server share: one set of them, for as long as any model has a line, whatever ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.events import Cancellation, Cancelled
from runtime.frames import MOST_PARTS, Frame, FrameError
from runtime.rank_errors import GroupError, RankLost
from runtime.rank_place import Meeting
from tests.ranks.processes import runs
from tests.ranks.test_group import PAUSE, UNITS, gone, settings, within
from triton_repo.serving_state import ServingState
from triton_repo.shared_ranks import KEEPER_GONE, SharedRanks, folder_of, start_shared

KEEPER = "triton_repo.rank_keeper"


def ask(ranks: SharedRanks, **header: Any) -> dict[str, Any]:
    """The end of a command's answer."""
    *_, end = ranks.run(header, (b"one", b""), Cancellation())
    assert end.parts == (b"one", b"")
    return dict(end.header)


def steps(folder: Path, rank: int) -> int:
    return len((folder / f"steps{rank}").read_text().splitlines())


def below(program: str) -> list[int]:
    """Process ids below this one that run a program."""
    found = psutil.Process().children(recursive=True)
    return [one.pid for one in found if runs(one.pid) and any(program in word for word in one.cmdline())]


def keeper_of(folder: Path) -> int:
    (pid,) = [pid for pid in below(KEEPER) if str(folder) in " ".join(psutil.Process(pid).cmdline())]
    return pid


def ranks_of(folder: Path) -> list[int]:
    """In no order; not their keeper, which has the folder in its settings."""
    return [pid for pid in below(str(folder)) if KEEPER not in psutil.Process(pid).cmdline()]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Of the socket; its path is longer than a socket's may be."""
    return tmp_path / ("a" * 100) / "ranks"


@pytest.fixture
def pair(tmp_path: Path, place: Path) -> Iterator[tuple[SharedRanks, SharedRanks]]:
    first, second = (start_shared(place, settings(tmp_path)) for _ in range(2))
    yield first, second
    pids = [*ranks_of(tmp_path), *below(KEEPER)]
    first.close()
    second.close()
    assert gone(pids)
    assert not place.exists()


def test_two_models_have_the_same_ranks_until_the_last_one_leaves(tmp_path: Path, place: Path) -> None:
    first, second = (start_shared(place, settings(tmp_path)) for _ in range(2))
    keeper, pids = keeper_of(tmp_path), ranks_of(tmp_path)
    assert len(pids) == 2
    assert oct(place.stat().st_mode & 0o777) == "0o700"
    for one in (first, second, first):
        assert ask(one, units=2)["sum"] == 3.0
        assert (one.facts, one.restarts) == ({"weights": [100, 101]}, 0)
    first.close()
    assert ask(second, units=1)["end"] == "done"
    assert ranks_of(tmp_path) == pids
    second.close()
    # At once, as a model whose process ends next must be able to rely on.
    assert not any(map(runs, pids))
    assert gone([keeper])
    assert not place.exists()


def test_an_answer_ends_when_it_is_cancelled_or_nobody_takes_it(
    tmp_path: Path, pair: tuple[SharedRanks, SharedRanks]
) -> None:
    first, second = pair
    cancellation, seen = Cancellation(), list[Frame]()
    for frame in first.run({"units": UNITS, "pause": PAUSE}, (), cancellation):
        seen.append(frame)
        if frame.header.get("unit") == 3:
            cancellation.cancel()
    assert seen[-1].header["end"] == "cancelled"
    assert steps(tmp_path, 0) == steps(tmp_path, 1) < UNITS / 2
    with closing(second.run({"units": UNITS, "pause": PAUSE}, (), Cancellation())) as answer:
        next(answer)
    assert steps(tmp_path, 0) == steps(tmp_path, 1) < UNITS / 2
    refused = ask_only_end(first, units=2, who="all", at=1, do="refuse")
    assert (refused["end"], refused["field"]) == ("refused", "seed")
    with pytest.raises(FrameError, match="parts"):
        next(first.run({"units": 1}, (b"",) * (MOST_PARTS + 1), Cancellation()))
    assert ask(first, units=1)["end"] == ask(second, units=1)["end"] == "done"


def ask_only_end(ranks: SharedRanks, **header: Any) -> dict[str, Any]:
    *_, end = ranks.run(header, (), Cancellation())
    return dict(end.header)


def test_what_a_killed_server_has_left_is_cleared_away(tmp_path: Path) -> None:
    folder_of(1234, tmp_path).mkdir()
    ServingState(tmp_path).clear()
    assert not folder_of(1234, tmp_path).exists()


def test_a_request_is_cancelled_while_ranks_start_anew(tmp_path: Path, pair: tuple[SharedRanks, SharedRanks]) -> None:
    (tmp_path / "slow").touch()
    keeper = keeper_of(tmp_path)
    os.kill(keeper, signal.SIGKILL)
    assert gone([keeper])
    cancellation = Cancellation()
    threading.Timer(1.0, cancellation.cancel).start()
    with pytest.raises(Cancelled, match="before its ranks were ready"):
        list(pair[0].run({"units": 1}, (), cancellation))
    (tmp_path / "slow").unlink()
    assert ask(pair[1], units=1)["end"] == "done"


def test_a_request_is_cancelled_while_another_has_the_ranks(pair: tuple[SharedRanks, SharedRanks]) -> None:
    first, second = pair
    answer = first.run({"units": UNITS, "pause": PAUSE}, (), Cancellation())
    next(answer)
    cancellation = Cancellation()
    threading.Timer(0.5, cancellation.cancel).start()
    end = list(second.run({"units": 1}, (), cancellation))[-1].header
    assert (end["end"], end["text"]) == ("cancelled", "cancelled before its turn")
    answer.close()


def test_a_keeper_without_descriptors_takes_the_line_later(
    tmp_path: Path, place: Path, pair: tuple[SharedRanks, SharedRanks]
) -> None:
    keeper = psutil.Process(keeper_of(tmp_path))
    before = keeper.rlimit(psutil.RLIMIT_NOFILE)
    # The first three are always taken.
    keeper.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))
    # Whoever comes next has the descriptor that is kept for him while he is waited for.
    third = start_shared(place, settings(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        fourth = pool.submit(start_shared, place, settings(tmp_path))
        try:
            with pytest.raises(TimeoutError):
                fourth.result(1.0)
        finally:
            keeper.rlimit(psutil.RLIMIT_NOFILE, before)
        assert ask(fourth.result(30), units=1)["end"] == "done"
    for one in (third, fourth.result()):
        one.close()


def test_what_is_killed_costs_one_command(tmp_path: Path, pair: tuple[SharedRanks, SharedRanks]) -> None:
    first, second = pair
    before = ranks_of(tmp_path)
    answer = first.run({"units": UNITS, "pause": PAUSE}, (), Cancellation())
    next(answer)
    os.kill(before[0], signal.SIGKILL)
    with pytest.raises(RankLost, match=r"rank \d was ended by SIGKILL") as lost:
        list(answer)
    assert lost.value.public.startswith("lost: rank")
    for one in pair:
        assert ask(one, units=1)["end"] == "done"
        assert one.restarts == 1
    between, keeper = ranks_of(tmp_path), keeper_of(tmp_path)
    assert not set(before) & set(between)

    answer = first.run({"units": UNITS, "pause": PAUSE}, (), Cancellation())
    next(answer)
    os.kill(keeper, signal.SIGKILL)
    with pytest.raises(RankLost, match=KEEPER_GONE):
        list(answer)
    # The other's line has ended too, which it sees before it asks.
    assert ask(second, units=1)["end"] == "done"
    assert ask(first, units=1)["end"] == "done"
    assert (first.restarts, second.restarts) == (2, 2)
    assert gone([*between, keeper])
    assert len(ranks_of(tmp_path)) == 2


def wait(folder: str, place: str, started: Any) -> None:
    ranks = start_shared(Path(place), settings(Path(folder)))
    answer = ranks.run({"units": UNITS, "pause": PAUSE}, (), Cancellation())
    next(answer)
    started.set()
    list(answer)


def test_a_model_that_is_killed_leaves_its_command_and_no_more(tmp_path: Path, place: Path) -> None:
    """It has started the keeper, which outlives it where another model has a line."""
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    model = context.Process(target=wait, args=(str(tmp_path), str(place), started))
    model.start()
    assert started.wait(60)
    other = start_shared(place, settings(tmp_path))
    keeper = keeper_of(tmp_path)
    model.kill()
    model.join()
    assert ask(other, units=2)["sum"] == 3.0
    assert steps(tmp_path, 0) == 2
    assert runs(keeper)
    other.close()
    assert gone([keeper])


def test_the_only_model_is_killed_while_ranks_start(tmp_path: Path, place: Path) -> None:
    (tmp_path / "slow").touch()
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    model = context.Process(target=wait, args=(str(tmp_path), str(place), started))
    model.start()
    assert within(60, lambda: len(keepers := below(KEEPER)) == 1 and bool(psutil.Process(keepers[0]).children()))
    pids = below(KEEPER) + [one.pid for one in psutil.Process(below(KEEPER)[0]).children()]
    model.kill()
    model.join()
    assert gone(pids)


def test_every_model_hears_why_ranks_do_not_start(tmp_path: Path, place: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(RankLost, match=r"rank 1 ended with status 1: .*an engine is broken"):
        start_shared(place, settings(tmp_path))
    (tmp_path / "broken").unlink()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        meeting = Meeting("127.0.0.1", taken.getsockname()[1], 2)
        with pytest.raises(GroupError, match=r"in use"):
            start_shared(place, settings(tmp_path, meeting=meeting))
    ranks = start_shared(place, settings(tmp_path))
    assert ask(ranks, units=1)["end"] == "done"
    ranks.close()
    assert below(KEEPER) == []
    assert json.dumps(ranks.facts) == '{"weights": [100, 101]}'


@pytest.mark.parametrize("wrong", ["open", "link"])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, wrong: str) -> None:
    place = tmp_path / "ranks"
    (tmp_path / "other").mkdir(mode=0o700)
    if wrong == "link":
        place.symlink_to(tmp_path / "other")
    else:
        place.mkdir()
        place.chmod(0o770)
    with pytest.raises(GroupError, match="must be a folder of this user alone"):
        start_shared(place, settings(tmp_path))
