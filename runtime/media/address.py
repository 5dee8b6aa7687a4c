"""Which network addresses a server may fetch from: public ones, and those that its operator names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver = Callable[[str, int], Sequence[str]]
"""Host and port -> addresses as text. Raises OSError where there are none."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOW_32_BITS = 0xFFFFFFFF


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system resolves it. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def is_allowed(text: str, also: Sequence[Network]) -> bool:
    """Whether an address is public, or in one of the networks `also` that the operator named.

    An address that carries another one inside (IPv4-mapped, 6to4, Teredo, NAT64) is judged by that one.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if any(address.version == network.version and address in network for network in also):
        return True
    carried = _carried(address)
    if carried:
        return all(is_allowed(str(one), also) for one in carried)
    # Site-local addresses (fec0::/10) are private ones of an older kind, which `is_global` does not know.
    local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not (local or address.is_multicast or address.is_reserved)


def _carried(address: Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that an IPv6 one leads to; for Teredo, its server and its client."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    carried = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        carried.append(ipaddress.IPv4Address(int(address) & _LOW_32_BITS))
    return [one for one in carried if one is not None]
