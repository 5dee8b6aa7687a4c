"""What ranks tell each other besides rows."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from engines.profile import Ranks
from runtime.events import Cancellation, Cancelled
from runtime.frames import MOST_BYTES
from runtime.peers import PeerFailed, Peers
from tests.ranks.spawn import RanksFailed, run_ranks

RANKS = Ranks(ulysses=4, text_encoder=2, video_tiles=1)


def meet(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Everything that peers do, on one rank."""
    peers = Peers.join(RANKS)
    assert (peers.rank, peers.size, peers.first) == (rank, size, rank == 0)
    assert peers.control is not None
    assert peers.rows is not None
    assert (peers.tensors is not None) == (rank < 2)
    assert peers.tiles is None
    found = {"rows": peers.rows.gather_rows(torch.tensor([rank]), size)}
    if peers.tensors is not None:
        found["tensors"] = peers.tensors.sum(torch.tensor([1.0 + rank]))
    shared = peers.from_first(lambda: {"a": torch.full((2, 3), 7, dtype=torch.bfloat16), "b": torch.zeros(0, 4)})
    found |= shared
    with pytest.raises(ValueError if rank == 0 else PeerFailed, match="no such picture"):
        peers.from_first(_raise(ValueError("no such picture")))
    with pytest.raises(Cancelled, match="tile 3"):
        peers.from_first(_raise(Cancelled("before tile 3")))
    with pytest.raises(Cancelled):
        peers.from_first(lambda: _stop(peers), together=True)
    found["steps"] = torch.tensor(_steps(peers))
    with pytest.raises(ValueError, match=f"{MOST_BYTES + 1} bytes"):
        peers.control.broadcast(_Long() if rank == 0 else b"")
    return found


def _stop(peers: Peers) -> dict[str, torch.Tensor]:
    """Work of all ranks that rank 0's cancellation ends."""
    cancellation = Cancellation()
    if peers.first:
        cancellation.cancel()
    agreed = peers.agreed(cancellation, peers.control)
    agreed.raise_within("an exchange")
    agreed.raise_if_cancelled("a layer")
    return {}


class _Long(bytes):
    """A message that says that it is too long."""

    def __len__(self) -> int:
        return MOST_BYTES + 1


def _raise(error: Exception):  # type: ignore[no-untyped-def]
    def make() -> dict[str, torch.Tensor]:
        raise error

    return make


def _steps(peers: Peers) -> int:
    """At which step this rank stops, when rank 0 is cancelled in the midst of some and another rank at once."""
    cancellation = Cancellation()
    agreed = peers.agreed(cancellation, peers.control)
    if peers.first:
        threading.Timer(0.05, cancellation.cancel).start()
    elif peers.rank == 1:
        cancellation.cancel()
    step = 0
    while not agreed.cancelled:
        step += 1
    return step


def test_what_rank_0_knows_all_know(tmp_path: Path) -> None:
    results = run_ranks(meet, 4, tmp_path)
    for found in results:
        assert found["rows"].tolist() == [0, 1, 2, 3]
        assert found["a"].dtype == torch.bfloat16
        assert torch.equal(found["a"], torch.full((2, 3), 7, dtype=torch.bfloat16))
        assert found["b"].shape == (0, 4)
        assert found["steps"] == results[0]["steps"] > 0, "one was not stopped with the others, or by another"
    assert [found.get("tensors", torch.zeros(1)).item() for found in results] == [3, 3, 0, 0]


def join(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Asks for more ranks than there are."""
    Peers.join(RANKS)
    return {}


def test_more_ranks_than_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"ranks\.ulysses = 4: there are 2 processes; start 4 of them"):
        run_ranks(join, 2, tmp_path)


def test_a_process_alone_asks_nobody() -> None:
    peers = Peers.alone()
    assert (peers.rank, peers.size, peers.first) == (0, 1, True)
    cancellation = Cancellation()
    assert peers.agreed(cancellation, peers.control) is cancellation
    made = {"a": torch.ones(1)}
    assert peers.from_first(lambda: made) == made
