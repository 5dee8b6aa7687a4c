"""One bounded GET: connects to an address that was checked, follows no redirect by itself, ends by a deadline."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

_CHUNK = 1 << 16
REDIRECTS = (301, 302, 303, 307, 308)

Clock = Callable[[], float]
"""Seconds of a clock that never goes back."""


class WebError(ValueError):
    """A fetch that failed; the message is what went wrong."""


@dataclass(frozen=True)
class Answer:
    """What a server sent. location: where a redirect points to, None for content."""

    content: bytes
    location: str | None = None


def get(url: SplitResult, address: str, bytes_maximum: int, seconds: float, clock: Clock) -> Answer:
    """The answer of one server to one GET, within so many bytes and seconds. Raises WebError.

    `address` is connected to, whatever the host's name resolves to by now; certificates are checked for the name.
    """
    end = clock() + seconds
    connection = _connection(url, address, seconds)
    try:
        connection.connect()
        with _ended(connection.sock, max(end - clock(), 0)):
            answer = _exchange(connection, url, bytes_maximum)
        # A connection that was ended by us looks like one that the server ended.
        if clock() >= end:
            raise WebError("too late")
        return answer
    except (HTTPError, OSError, ValueError) as error:
        if clock() >= end:
            raise WebError(f"took longer than {seconds:g} s") from error
        raise error if isinstance(error, WebError) else WebError(_cause(error)) from error
    finally:
        connection.close()


def port_of(url: SplitResult) -> int:
    """The port of an http or https URL. Raises ValueError where it is no number."""
    return url.port or (443 if url.scheme == "https" else 80)


def _connection(url: SplitResult, address: str, seconds: float) -> HTTPConnection:
    port, host = port_of(url), url.hostname or ""
    if url.scheme == "https":
        # A certificate must name the host of the URL, not the address that is connected to.
        return HTTPSConnection(address, port, timeout=seconds, server_hostname=host, assert_hostname=host)
    return HTTPConnection(address, port, timeout=seconds)


@contextmanager
def _ended(connected: socket.socket | None, seconds: float) -> Iterator[None]:
    """Ends a connection at the deadline: a socket's own timeout begins anew with every byte that drips in."""

    def end() -> None:
        # The connection forgets its socket as soon as an answer begins, so it is taken before.
        if connected is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exchange(connection: HTTPConnection, url: SplitResult, bytes_maximum: int) -> Answer:
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    headers = {"Host": url.netloc, "Accept-Encoding": "identity", "User-Agent": "h3trt"}
    connection.request("GET", target, headers=headers, preload_content=False, decode_content=False)
    response = connection.getresponse()
    if response.status in REDIRECTS:
        return Answer(b"", response.headers.get("Location", ""))
    if response.status != 200:
        raise WebError(f"the server answers {response.status}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise WebError("the server compresses what was asked for uncompressed")
    return Answer(_body(response, bytes_maximum))


def _body(response: BaseHTTPResponse, bytes_maximum: int) -> bytes:
    claimed = response.headers.get("Content-Length", "")
    if claimed.isdigit() and int(claimed) > bytes_maximum:
        raise WebError(f"the server announces {int(claimed)} bytes, more than {bytes_maximum}")
    parts, total = [], 0
    while part := response.read1(_CHUNK):
        parts.append(part)
        total += len(part)
        if total > bytes_maximum:
            raise WebError(f"the server sends more than {bytes_maximum} bytes")
    return b"".join(parts)


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return f"{type(reason).__name__}: {reason}"
