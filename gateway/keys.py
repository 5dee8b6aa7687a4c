"""API keys: a file with a name and a key a line, of which only hashes stay in memory."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from triton_repo.errors import ServerError

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})\s+(?P<key>[\x21-\x7e]{16,256})")
_RULE = "a line is NAME KEY: a name of letters, digits, dots, dashes and underscores, a key of 16 to 256 characters"


class Keys:
    """The keys that open the gateway, each with the name of its owner."""

    def __init__(self, keys: dict[str, str]) -> None:
        """keys: by key, the owner's name."""
        self._owners = {_digest(key): owner for key, owner in keys.items()}

    @classmethod
    def read(cls, file: Path) -> Keys:
        """The keys of a file; empty lines and such that begin with # do not count. Raises ServerError, OSError."""
        found: dict[str, str] = {}
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None:
                # The line itself is not shown: it may hold a key.
                raise ServerError(f"{file}, line {number}: {_RULE}")
            found[match["key"]] = match["name"]
        if not found:
            raise ServerError(f"{file}: holds no key; {_RULE}")
        return cls(found)

    def owner(self, authorization: str | None) -> str | None:
        """Whose key an Authorization header carries; None for none that is known.

        Every key is compared, in constant time, so that the time says nothing of which was nearly right.
        """
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        found = None
        for digest, owner in self._owners.items():
            if hmac.compare_digest(digest, given):
                found = owner
        return found if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
