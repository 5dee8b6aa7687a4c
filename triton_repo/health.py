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
}
"""The smallest clip."""

SHORTEST: Mapping[str, Any] = {**CANARY, "num_inference_steps": 1}
"""In one forward, which a model that was distilled to some other number refuses."""


def check(url: str, seconds: float, generate: bool = False) -> str:
    """How the server at `url` (host:port of gRPC) is, in words. Raises ClientError if it would serve no request.

    A dry run goes through its front and through h3_prepare. `generate`: make the smallest clip too, unless it has
    requests already, whose progress its watchdog watches.
    """
    with Client(url) as client:
        missing = [model for model in (*PUBLIC_MODELS, PREPARE) if not client.is_ready(model)]
        if missing:
            raise ClientError(Failure.UNAVAILABLE, f"not ready: {', '.join(missing)}")
        params, queue = _dry_run(client, seconds)
        if not generate:
            return "a dry run was answered"
        if queue and queue["waiting"] + queue["running"]:
            return "a dry run was answered; the server has requests, so no clip was asked for"
        clip = client.generate(CANARY_PROMPT, params, timeout=seconds)
        return f"a clip of {len(clip.mp4)} bytes was made"


def _dry_run(client: Client, seconds: float) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """A request that the server takes, and its queue, if it tells.

    A server of references alone refuses both canaries, which is an answer too.
    """
    for params in (SHORTEST, CANARY):
        try:
            resolved = client.resolve(CANARY_PROMPT, params, seconds)
        except ClientError as error:
            if error.failure is not Failure.INVALID:
                raise
        else:
            return params, (resolved.get("estimate") or {}).get("queue")
    return SHORTEST, None
