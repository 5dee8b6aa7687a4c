"""The web page: one file, which may run its own script and talk to its own gateway, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib import resources

from fastapi import Response

_POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; "
    "media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Page:
    """The page and the policy that a browser holds it to."""

    html: bytes
    policy: str

    @classmethod
    def read(cls) -> Page:
        """The page of this package."""
        html = resources.files("gateway").joinpath("page.html").read_text(encoding="utf-8")
        hashes = {name: _hash(_inline(html, name)) for name in ("script", "style")}
        return cls(html.encode(), _POLICY.format(**hashes))

    def response(self) -> Response:
        """The answer to a browser."""
        headers = {"Content-Security-Policy": self.policy, "Referrer-Policy": "no-referrer"}
        return Response(self.html, media_type="text/html; charset=utf-8", headers=headers)


def _inline(html: str, element: str) -> str:
    found = re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)
    assert len(found) == 1, f"the page has one {element}"
    return found[0]


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
