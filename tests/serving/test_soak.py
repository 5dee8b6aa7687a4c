"""Hundreds of requests of all kinds to one server: it must neither grow nor drift, and the last clip be the first."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from tests.request.vectors import SMALL, VECTORS, Vector
from triton_repo.client import Client, ClientError, Failure
from triton_repo.server import TritonServer

PROMPT = "A red fox trots through fresh snow."
QUICK = {**SMALL, "num_inference_steps": 1, "seed": 5}
ROUNDS = 200
GROWTH = 1.15
"""What all processes together may have gained after the warm-up: allocators keep some, a leak of one clip a request
(6 MB of latents and frames each) would add more than this."""

REFUSED = [v for v in VECTORS if v.refused is not None and isinstance(v.params, dict) and isinstance(v.prompt, str)]


class _Enough(Exception):
    """Ends a request from within, as Ctrl-C would."""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_hundreds_of_mixed_requests_leave_the_server_as_it_was(server: TritonServer) -> None:
    choose = random.Random(0)
    with Client(server.endpoints.grpc) as client:
        first = client.generate(PROMPT, QUICK).mp4
        for _ in range(10):
            _cancelled(client, choose)
            client.generate_unary(PROMPT, QUICK)
        before = _memory(server)
        for _ in range(ROUNDS):
            choose.choice((_cancelled, _refused, _generated))(client, choose)
        assert client.generate(PROMPT, QUICK).mp4 == first
    assert _memory(server) < GROWTH * before


def _cancelled(client: Client, choose: random.Random) -> None:
    def stop(event: Mapping[str, Any]) -> None:
        raise _Enough

    with pytest.raises(_Enough):
        client.generate(PROMPT, {**QUICK, "num_inference_steps": 200}, stop)


def _refused(client: Client, choose: random.Random) -> None:
    vector: Vector = choose.choice(REFUSED)
    with pytest.raises(ClientError) as caught:
        client.generate(str(vector.prompt), vector.params)
    assert caught.value.failure is Failure.INVALID


def _generated(client: Client, choose: random.Random) -> None:
    assert client.generate(PROMPT, {**QUICK, "seed": choose.randrange(100)}).mp4


def _memory(server: TritonServer) -> int:
    """Resident bytes of the server and its models."""
    process = psutil.Process(server.pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
