"""Fetches a reference file: from a data: URL, from a web host that the operator allows, or from the media root."""

from __future__ import annotations

import binascii
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urljoin, urlsplit

from runtime.media.address import Network, Resolver, is_allowed, resolve
from runtime.media.facts import Kind
from runtime.media.limits import LIMITS, check_bytes
from runtime.media.web import Clock, WebError, get, port_of
from runtime.refusal import RequestError

_SCHEMES = ("https", "http")
_DEFAULT_PORTS = {"https": 443, "http": 80}
_HOST_RULE = "its host must be one that the operator allows"


@dataclass(frozen=True)
class MediaPolicy:
    """Where reference files may come from, besides the request itself. By default from nowhere.

    url_hosts: host names of http and https URLs, `example.org` for exactly that one or `*.example.org` for all below
    it, each followed by `:port` where it is not the scheme's own. networks: addresses besides public ones that those
    hosts may have, as a media store's on the operator's own network. root: the directory below which relative paths
    are read. seconds and redirects bound one fetch. resolver and clock are the system's.
    """

    url_hosts: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()
    root: Path | None = None
    seconds: float = 60.0
    redirects: int = 3
    resolver: Resolver = resolve
    clock: Clock = time.monotonic


def fetch(source: str, kind: Kind, policy: MediaPolicy, where: str) -> bytes:
    """The whole file that `source` names, at most as large as its kind may be. Raises RequestError."""
    scheme = source.partition(":")[0].lower() if ":" in source else ""
    if scheme == "data":
        content = _data_url(source, kind, where)
    elif scheme in _SCHEMES:
        content = _web(source, kind, policy, where)
    elif policy.root is not None and not scheme:
        content = _below_root(source, kind, policy.root, where)
    else:
        rule = "must be a data: URL, or an https: or http: URL of a host that the operator allows"
        raise RequestError(where, source, rule if policy.root is None else f"{rule}, or a path below the media root")
    check_bytes(len(content), kind, where)
    return content


def _data_url(source: str, kind: Kind, where: str) -> bytes:
    """The bytes of a data: URL (RFC 2397) in strict base64. Its media type is not read: the content tells it."""
    header, comma, text = source.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise RequestError(where, header, "a data: URL must be data:<type>;base64,<data>")
    # Four characters hold three bytes; refused before they are unpacked.
    size = len(text) * 3 // 4 - text[-2:].count("=")
    check_bytes(size, kind, where)
    try:
        content = binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        content = b""
    # Python's strict mode still lets more padding through than belongs there.
    if len(content) != size:
        raise RequestError(where, f"{header},...", "must hold base64 without line breaks, padded with =")
    return content


def _web(source: str, kind: Kind, policy: MediaPolicy, where: str) -> bytes:
    end = policy.clock() + policy.seconds
    url = source
    for _ in range(policy.redirects + 1):
        parts = _checked_url(url, policy, where)
        address = _address(parts, policy, where)
        try:
            left = max(end - policy.clock(), 0.001)
            answer = get(parts, address, LIMITS[kind].bytes_maximum, left, policy.clock)
        except WebError as error:
            rule = f"must be fetched within {policy.seconds:g} s and {LIMITS[kind].size_text}: {error}"
            raise RequestError(where, url, rule) from error
        if answer.location is None:
            return answer.content
        following = urljoin(url, answer.location)
        if parts.scheme == "https" and not following.startswith("https:"):
            raise RequestError(where, following, "a redirect must not leave https")
        url = following
    raise RequestError(where, source, f"must lead to a file after at most {policy.redirects} redirects")


def _checked_url(url: str, policy: MediaPolicy, where: str) -> SplitResult:
    """The parts of a URL that may be fetched; every step of a redirect is checked like the first."""
    try:
        if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise ValueError("characters that a URL must escape")
        parts = urlsplit(url)
        port = port_of(parts)
    except ValueError as error:
        raise RequestError(where, url, f"must be a well-formed URL: {error}") from error
    host = (parts.hostname or "").rstrip(".")
    if parts.scheme not in _SCHEMES or not host:
        raise RequestError(where, url, "must be an https: or http: URL with a host")
    if parts.username is not None or parts.password is not None:
        raise RequestError(where, f"{parts.scheme}://...@{host}", "must have no user name or password in its URL")
    if not any(_matches(pattern, host, port, parts.scheme) for pattern in policy.url_hosts):
        allowed = policy.url_hosts or None
        rule = _HOST_RULE if allowed else f"{_HOST_RULE}, and none is: send the file itself or a data: URL"
        raise RequestError(where, url, rule, allowed)
    return parts


def _matches(pattern: str, host: str, port: int, scheme: str) -> bool:
    name, colon, digits = pattern.lower().rpartition(":")
    if not colon:
        name, digits = pattern.lower(), str(_DEFAULT_PORTS[scheme])
    if digits != str(port):
        return False
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def _address(url: SplitResult, policy: MediaPolicy, where: str) -> str:
    """An address of the host. All that it has must be allowed: a name may hide a private one among public ones."""
    host = (url.hostname or "").rstrip(".")
    try:
        found = list(policy.resolver(host, port_of(url)))
    except (OSError, UnicodeError) as error:
        raise RequestError(where, url.geturl(), "its host must have an address") from error
    if not found or not all(is_allowed(one, policy.networks) for one in found):
        raise RequestError(where, url.geturl(), "its host must have public addresses only")
    return found[0]


def _below_root(source: str, kind: Kind, root: Path, where: str) -> bytes:
    """A file below the media root, opened once and checked by what was opened: no way leads out of the root."""
    rule = "must be the path of a file below the media root"
    if "\0" in source or len(source) > 4096:
        raise RequestError(where, source, rule)
    try:
        base = root.resolve(strict=True)
        path = (base / source).resolve(strict=True)
        if not path.is_relative_to(base):
            raise RequestError(where, source, rule)
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError) as error:
        raise RequestError(where, source, rule) from error
    try:
        opened, status = Path(f"/proc/self/fd/{handle}").resolve(), os.fstat(handle)
        if not opened.is_relative_to(base) or not stat.S_ISREG(status.st_mode):
            raise RequestError(where, source, rule)
        check_bytes(status.st_size, kind, where)
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(LIMITS[kind].bytes_maximum + 1)
    finally:
        os.close(handle)
