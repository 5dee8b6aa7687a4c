"""Who is served first, who has waited too long, and who cannot be served in time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tritonclient.grpc import InferenceServerClient

from tests.serving.conftest import Toy
from tests.serving.test_isolation import PAUSE
from tests.serving.test_life_cycle import Background
from tests.serving.test_requests import PROMPT, QUICK
from triton_repo.client import Client, ClientError, Failure
from triton_repo.messages import request_inputs
from triton_repo.names import HIGH, NORMAL, STREAM
from triton_repo.server import TritonServer


def _ask(server: TritonServer, params: dict[str, Any], priority: int = NORMAL) -> Background:
    """A request in the background; its outcome is when it ended."""

    def ask() -> float:
        with Client(server.endpoints.grpc) as client:
            client.generate("p", params, priority=priority)
        return time.monotonic()

    return Background(ask)


def test_an_urgent_request_overtakes_those_that_wait(toy_server: TritonServer) -> None:
    running = _ask(toy_server, {"units": 10, "pause": PAUSE})
    time.sleep(2 * PAUSE)
    normal = _ask(toy_server, {"units": 2, "pause": PAUSE})
    time.sleep(2 * PAUSE)
    urgent = _ask(toy_server, {"units": 2, "pause": PAUSE}, HIGH)
    ended = [one.join() for one in (running, urgent, normal)]
    assert ended == sorted(ended)  # type: ignore[type-var]


@pytest.mark.parametrize("running", ["generate", "generate_unary"])
def test_a_dry_run_is_not_behind_what_waits_for_the_device(toy_server: TritonServer, running: str) -> None:
    """Triton's rate limiter serves in turn, and a model whose turn it is keeps all others waiting with it."""
    (waiting,) = {"generate", "generate_unary"} - {running}

    def ask(how: str, units: int) -> Background:
        def call() -> float:
            with Client(toy_server.endpoints.grpc) as client:
                getattr(client, how)("p", {"units": units, "pause": PAUSE})
            return time.monotonic()

        return Background(call)

    holds = ask(running, 20)
    time.sleep(2 * PAUSE)
    waits = ask(waiting, 1)
    time.sleep(2 * PAUSE)
    with Client(toy_server.endpoints.grpc) as client:
        client.resolve("p", {})
    answered = time.monotonic()
    ended = [one.join() for one in (holds, waits)]
    assert [answered, *ended] == sorted([answered, *ended])  # type: ignore[type-var]


def test_a_request_waits_no_longer_than_its_deadline(toy_server: TritonServer) -> None:
    running = _ask(toy_server, {"units": 20, "pause": PAUSE})
    time.sleep(2 * PAUSE)
    waiting = _ask(toy_server, {"deadline": 3 * PAUSE})
    refused = waiting.join()
    assert isinstance(refused, ClientError)
    assert (refused.failure, "timeout expired" in str(refused)) == (Failure.UNAVAILABLE, True)
    assert isinstance(running.join(), float)


def test_a_dry_run_estimates_and_a_hopeless_deadline_is_refused_before_any_work(server: TritonServer) -> None:
    with Client(server.endpoints.grpc) as client:
        client.generate(PROMPT, QUICK)
        estimate = _measured(client)
        assert estimate["stages"]["denoise"] > 0
        assert estimate["seconds"] > estimate["stages"]["denoise"]
        assert estimate["memory_bytes"] > 100 << 20
        assert estimate["queue"] == {"waiting": 0, "running": 0, "seconds": 0}
        hopeless = {**QUICK, "num_inference_steps": 200, "deadline": 1}
        for call in (client.generate, client.generate_unary):
            with pytest.raises(ClientError, match=r"deadline: got 1.0; the request takes about") as caught:
                call(PROMPT, hopeless)
            assert caught.value.failure is Failure.INVALID


def _measured(client: Client) -> Any:
    """The estimate once the request that has just been answered is on record, which follows the answer."""
    deadline = time.monotonic() + 10
    while (estimate := client.resolve(PROMPT, QUICK)["estimate"])["seconds"] is None and time.monotonic() < deadline:
        time.sleep(PAUSE)
    return estimate


def test_a_stream_whose_deadline_passed_in_the_queue_is_refused_when_its_turn_comes(server: TritonServer) -> None:
    """Its arrival, by the server's own clock, is what the dry run said."""
    params = {**QUICK, "deadline": 60}
    with Client(server.endpoints.grpc) as client, InferenceServerClient(server.endpoints.grpc) as raw:
        arrival = client.resolve(PROMPT, params)["estimate"]["arrival"]
        late = _stream_error(raw, params, arrival - 61_000_000)
        assert late.startswith("late: the deadline of 60 s cannot be met: 61.")
        assert _stream_error(raw, params, -1).startswith("arrival: got -1; ")


def _stream_error(raw: InferenceServerClient, params: dict[str, Any], arrival: int) -> str:
    answers: list[Any] = []
    raw.start_stream(lambda result, error: answers.append(error))
    raw.async_stream_infer(STREAM, request_inputs(PROMPT, params, None), parameters={"arrival": arrival})
    deadline = time.monotonic() + 30
    while not answers and time.monotonic() < deadline:
        time.sleep(0.02)
    raw.stop_stream()
    assert answers[0] is not None
    return str(answers[0].message())


def test_one_request_has_one_id_in_the_log_of_all_models(toy_server: TritonServer, shared_toy: Toy) -> None:
    with InferenceServerClient(toy_server.endpoints.grpc) as raw:
        raw.infer("h3", request_inputs("p", {}, None), request_id="find-me")
    lines = [line for line in shared_toy.log_file.read_text().splitlines() if line.startswith("{")]
    said = [entry for entry in map(json.loads, lines) if entry.get("request") == "find-me"]
    assert [(entry["source"], entry["event"]) for entry in said] == [
        ("h3_prepare", "done"),
        ("first", "done"),
        ("second", "done"),
    ]
