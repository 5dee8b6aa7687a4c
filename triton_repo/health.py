"""Whether a server would serve a request now, found out by asking it to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.contract import SIDE_MINIMUM
from triton_repo.client import Client
from triton_repo.messages import ClientError, Failure
from triton_repo.names import PREPARE, PUBLIC_MODELS

CANARY_PROMPT = "A canary sings."

CANARY: Mapping[str, Any] = {
    "aspect_ratio": "1:1",
    "width": SIDE_MINIMUM,
    "height": SIDE_MINIMUM,
    "duration": 4,
    "num_inference_steps": 1,
}
"""The smallest clip."""


def check(url: str, seconds: float, generate: bool = False) -> str:
    """How the server at `url` (host:port of gRPC) is, in words. Raises ClientError if it would serve no request.

    A dry run goes through its front and through h3_prepare. `generate`: make the smallest clip too, unless it has
    requests already, whose progress its watchdog watches.
    """
    with Client(url) as client:
        missing = [model for model in (*PUBLIC_MODELS, PREPARE) if not client.is_ready(model)]
        if missing:
            raise ClientError(Failure.UNAVAILABLE, f"not ready: {', '.join(missing)}")
        queue = _dry_run(client, seconds)
        if not generate:
            return "a dry run was answered"
        if queue and queue["waiting"] + queue["running"]:
            return "a dry run was answered; the server has requests, so no clip was asked for"
        clip = client.generate(CANARY_PROMPT, CANARY, timeout=seconds)
        return f"a clip of {len(clip.mp4)} bytes was made"


def _dry_run(client: Client, seconds: float) -> Mapping[str, Any] | None:
    """The server's queue, if it tells. A server of references alone refuses the canary, which is an answer too."""
    try:
        return (client.resolve(CANARY_PROMPT, CANARY, seconds).get("estimate") or {}).get("queue")
    except ClientError as error:
        if error.failure is not Failure.INVALID:
            raise
        return None
