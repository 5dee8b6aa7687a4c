"""Where one rank is: the names of environment variables that torchrun has, and what follows from them.

Imports no torch, so that a rank can see to it that it dies with its server, and which GPU it has, before anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from runtime.rank_errors import GroupError

LOOPBACK = "127.0.0.1"

SOCKET_VARIABLE = "H3TRT_RANK_SOCKET"
"""The inherited socket on which a rank talks with the server that has started it, as a file descriptor."""

LISTENER_VARIABLE = "H3TRT_RANK_LISTENER"
"""The inherited socket, bound and listening, at which rank 0 has the others meet."""

PARENT_VARIABLE = "H3TRT_RANK_PARENT"
"""Process id of that server."""

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}
"""NCCL without NVLink multicast, which needs more of a host than every one has. What an operator has set stays."""

_GPUS = "CUDA_VISIBLE_DEVICES"
_LAST_PORT = 65535


@dataclass(frozen=True)
class Meeting:
    """Where ranks meet: `local` of them, the first, are started by the server, the others elsewhere, by torchrun.

    port: 0 takes any free one, where all ranks are local. local: 0 stands for all.
    """

    address: str = LOOPBACK
    port: int = 0
    local: int = 0

    @staticmethod
    def of(environment: Mapping[str, str]) -> Meeting:
        """What MASTER_ADDR, MASTER_PORT and LOCAL_WORLD_SIZE say; without MASTER_ADDR all ranks are on this machine.

        Raises GroupError.
        """
        address = environment.get("MASTER_ADDR", "")
        if not address:
            return Meeting()
        port, local = (_number(environment, name) for name in ("MASTER_PORT", "LOCAL_WORLD_SIZE"))
        if not 1 <= port <= _LAST_PORT:
            raise GroupError(f"MASTER_PORT: got {port}; must be from 1 to {_LAST_PORT}")
        return Meeting(address, port, local)


@dataclass(frozen=True)
class Place:
    """One rank's: its rank of `size`, its number on this machine, and where to meet. `socket`: of its server, or -1.

    listener: of rank 0 where it was given one, else -1. parent: 0 for a rank that no server has started.
    """

    rank: int
    size: int
    local: int
    address: str
    port: int
    socket: int = -1
    listener: int = -1
    parent: int = 0

    @staticmethod
    def of(environment: Mapping[str, str], first: int = 0, size: int = 0, meet: str = "") -> Place:
        """What the environment says.

        first, size, meet (host:port): of ranks that torchrun has started on a machine beside the server's, where
        `first` ranks are before them. Raises GroupError.
        """
        rank, here = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
        host, _, port = meet.rpartition(":")
        if meet and not (host and port.isdigit()):
            raise GroupError(f"--meet: got {meet!r}; must be HOST:PORT, as MASTER_ADDR and MASTER_PORT of the server")
        total = size or here
        if not 0 <= first + rank < total:
            raise GroupError(f"rank {first + rank}: must be below {total}; see to --first-rank and --ranks")
        optional = {name: int(environment.get(name, default)) for name, default in _OPTIONAL.items()}
        return Place(
            rank=first + rank,
            size=total,
            local=_number(environment, "LOCAL_RANK"),
            address=host or environment.get("MASTER_ADDR", LOOPBACK),
            port=int(port) if meet else _number(environment, "MASTER_PORT"),
            socket=optional[SOCKET_VARIABLE],
            listener=optional[LISTENER_VARIABLE],
            parent=optional[PARENT_VARIABLE],
        )

    def environment(self, local_size: int, threads: int) -> dict[str, str]:
        """The variables that a rank's process is started with. `threads`: of torch in each rank, 0: its own choice."""
        names = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local,
            "WORLD_SIZE": self.size,
            "LOCAL_WORLD_SIZE": local_size,
            "MASTER_PORT": self.port,
            SOCKET_VARIABLE: self.socket,
            LISTENER_VARIABLE: self.listener,
            PARENT_VARIABLE: self.parent,
        }
        shared = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        # What is all on this machine listens on this machine alone.
        alone = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if self.address == LOOPBACK else {}
        return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": self.address} | shared | alone


_OPTIONAL = {SOCKET_VARIABLE: "-1", LISTENER_VARIABLE: "-1", PARENT_VARIABLE: "0"}


def see_one_gpu(local: int, environment: MutableMapping[str, str]) -> None:
    """Leaves a process the GPU of its number among those that it may use; before CUDA and NCCL start."""
    for name, value in NO_MULTICAST.items():
        environment.setdefault(name, value)
    visible = environment[_GPUS].split(",") if _GPUS in environment else list(map(str, range(local + 1)))
    environment[_GPUS] = visible[local] if local < len(visible) else ""


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise GroupError(f"{name}: got {text!r}; must be a whole number in the environment, as torchrun has it")
    return int(text)
