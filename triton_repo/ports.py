"""Which loopback ports the server listens on."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping

from triton_repo.errors import ServerError

LOOPBACK = "127.0.0.1"
DEFAULT_PORTS = {"grpc": 8001, "http": 8000, "metrics": 8002}
"""Triton's own usual ports, by service."""

# Below the range that the kernel hands to outgoing connections, which could take a port before the server binds it.
_FREE_PORTS = range(20000, 32000)


def choose_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """A port for each service: the wanted one where it is free, any free one for 0. Raises ServerError."""
    _check_different(wanted)
    for service, port in wanted.items():
        if port and not port_is_free(port):
            raise ServerError(f"{service} port {port} on {LOOPBACK} is in use", f"give another: --{service}-port PORT")
    candidates = (port for port in random.sample(_FREE_PORTS, len(_FREE_PORTS)) if port not in wanted.values())
    free = filter(port_is_free, candidates)
    return {service: port or next(free) for service, port in wanted.items()}


def _check_different(wanted: Mapping[str, int]) -> None:
    owners: dict[int, str] = {}
    for service, port in wanted.items():
        other = owners.setdefault(port, service)
        if port and other != service:
            raise ServerError(f"{other} and {service} cannot share port {port}", f"give another: --{service}-port PORT")


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        # As tritonserver does, so that connections in TIME_WAIT do not count as somebody listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
