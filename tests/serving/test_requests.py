"""Real requests to the real server: the contract's vectors, reproducible clips, cancellation, progress."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from runtime.intake import Intake
from runtime.probe import inspect_mp4
from runtime.request import RequestError, Resolved, parse_params
from tests.conftest import Demonstration
from tests.request.vectors import SMALL, VECTORS, Vector
from triton_repo.client import Client, ClientError, Failure
from triton_repo.server import TritonServer

PROMPT = "A red fox trots through fresh snow."
QUICK = {**SMALL, "num_inference_steps": 1, "seed": 5}


@pytest.fixture(scope="module")
def clip(server: TritonServer) -> bytes:
    with Client(server.endpoints.grpc) as one:
        return one.generate(PROMPT, QUICK).mp4


@pytest.fixture(scope="module")
def intake(demonstration: Demonstration) -> Intake:
    """Here only to tell which requests this machine's memory does not admit."""
    return Intake.open(demonstration.store)


def _named(refused: bool) -> list[Any]:
    return [pytest.param(vector, id=vector.name) for vector in VECTORS if (vector.refused is not None) is refused]


def _text(name: str, value: bytes) -> InferInput:
    tensor = InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value], dtype=np.object_))
    return tensor


def _inputs(vector: Vector) -> list[InferInput]:
    return [_text("PROMPT", vector.prompt_bytes), _text("PARAMS", vector.params_bytes)]


def _message(raw: InferenceServerClient, model: str, inputs: list[InferInput]) -> str:
    """The text of a refusal, which must be INVALID_ARGUMENT where errors have codes: not on a stream."""
    if model != "h3_stream":
        with pytest.raises(InferenceServerException) as caught:
            raw.infer(model, inputs)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        return str(caught.value.message()).removeprefix("in ensemble 'h3', ")
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    raw.start_stream(lambda result, error: answers.put(error))
    raw.async_stream_infer(model, inputs)
    error = answers.get(timeout=30)
    raw.stop_stream()
    assert error is not None
    return str(error.message())


@pytest.mark.parametrize("model", ["h3", "h3_stream"])
@pytest.mark.parametrize("vector", _named(refused=True))
def test_an_illegal_request_is_refused_with_field_value_and_rule(
    raw: InferenceServerClient, model: str, vector: Vector
) -> None:
    refused = vector.refused
    assert refused is not None
    message = _message(raw, model, _inputs(vector))
    assert message.startswith(refused.opening)
    assert refused.rule in message
    assert refused.nearest is None or message.endswith(f"; nearest legal: {refused.nearest}")


@pytest.mark.parametrize("vector", _named(refused=False))
def test_a_legal_request_resolves(raw: InferenceServerClient, intake: Intake, vector: Vector) -> None:
    """Or is refused for its size, where this machine's memory does not admit it."""
    refusal = refusal_for_size(intake, vector)
    if refusal is not None:
        assert _message(raw, "h3_prepare", _inputs(vector)) == refusal
        return
    resolved = json.loads(raw.infer("h3_prepare", _inputs(vector)).as_numpy("RESOLVED")[0])
    expected = {**vector.resolves, "prompt": vector.prompt_bytes.decode()}
    assert {name: resolved[name] for name in expected} == expected


def refusal_for_size(intake: Intake, vector: Vector) -> str | None:
    """What this machine's memory says to a request."""
    try:
        intake.resolve(vector.prompt_bytes, parse_params(vector.params_bytes))
    except RequestError as error:
        return str(error)
    return None


def test_after_all_refusals_the_next_request_works(client: Client, clip: bytes) -> None:
    assert client.generate(PROMPT, QUICK).mp4 == clip


def test_a_clip_is_what_its_resolved_request_says(client: Client, clip: bytes) -> None:
    resolved = client.resolve(PROMPT, QUICK)
    report = inspect_mp4(clip)
    assert report.problems(resolved["width"], resolved["height"], resolved["frames"]) == []
    assert (report.video.frames, report.video.width, report.video.height) == (107, 256, 256)


def test_the_ensemble_makes_the_same_bytes_as_the_stream(client: Client, clip: bytes) -> None:
    answer = client.generate_unary(PROMPT, QUICK)
    assert answer.mp4 == clip
    assert {**answer.resolved, "estimate": None} == {**client.resolve(PROMPT, QUICK), "estimate": None}


def test_another_seed_and_another_prompt_make_other_bytes(client: Client, clip: bytes) -> None:
    other = client.generate(PROMPT, {**QUICK, "seed": 6}).mp4
    assert other != clip
    assert client.generate("Rain on a tin roof.", QUICK).mp4 not in (clip, other)


def test_progress_runs_through_the_stages_in_order(client: Client) -> None:
    events: list[Any] = []
    client.generate(PROMPT, {**QUICK, "num_inference_steps": 2}, events.append)
    stages = list(dict.fromkeys(event["stage"] for event in events))
    assert stages == ["encode", "denoise", "decode"]
    assert [event["index"] for event in events if event["stage"] == "denoise"] == [0, 1, 2]
    assert [event["seconds"] for event in events] == sorted(event["seconds"] for event in events)


def test_a_tier_of_quality_is_what_the_request_gets(client: Client) -> None:
    events: list[Any] = []
    two = {**QUICK, "num_inference_steps": 2}
    made = client.generate(PROMPT, {**two, "quality": "skip"}, events.append)
    # Of two forwards the first, at sigma 1, is above the gate.
    assert [one["attention"] for one in made.resolved["quality"]["attending"]] == ["dense", "skip"]
    assert [event["skipped_tiles"] > 0 for event in events if "skipped_tiles" in event] == [True]
    assert made.mp4 != client.generate(PROMPT, two).mp4


class Stop(Exception):
    """Raised in a progress callback."""


def test_cancelling_mid_denoise_frees_the_server_within_a_step(client: Client) -> None:
    seen: list[tuple[str, int, float]] = []

    def stop(event: Any) -> None:
        seen.append((event["stage"], event["index"], time.monotonic()))
        if event["stage"] == "denoise" and event["index"] == 2:
            raise Stop

    with pytest.raises(Stop):
        client.generate(PROMPT, {**QUICK, "num_inference_steps": 200}, stop)
    cancelled = time.monotonic()
    first, second = (moment for stage, index, moment in seen if stage == "denoise" and index > 0)
    begun: list[float] = []

    def begin(event: Any) -> None:
        begun.append(time.monotonic())
        raise Stop

    with pytest.raises(Stop):
        client.generate(PROMPT, QUICK, begin)
    # The next request's first event comes when the step that was running has ended; 200 steps would take minutes.
    assert begun[0] - cancelled < 2 * (second - first) + 2


def test_the_stages_believe_nothing_they_are_sent(raw: InferenceServerClient) -> None:
    """Clients can call them by themselves."""
    forged = _text("RESOLVED", b'{"task": "t2va"}')
    with pytest.raises(InferenceServerException, match=r"TEXT.*\[-1,\d+\]"):
        raw.infer("h3_denoise", [forged, *_encoded(raw, width=1)])
    assert "resolved" in _message(raw, "h3_denoise", [forged, *_encoded(raw)])


@pytest.mark.parametrize(
    ("changes", "opening"),
    [
        ({"tags": [1, 1]}, "TAGS: got '2 rows'"),
        ({"tags": [7]}, "TAGS: got 'another value'"),
        ({"video": 1}, "CONDITION_VIDEO: got '1 rows'"),
        ({"audio": 2}, "CONDITION_AUDIO: got '2 rows'"),
    ],
)
def test_rows_that_the_resolved_request_does_not_have_are_refused(
    client: Client, raw: InferenceServerClient, changes: dict[str, Any], opening: str
) -> None:
    resolved = _text("RESOLVED", json.dumps(client.resolve(PROMPT, QUICK)).encode())
    assert _message(raw, "h3_denoise", [resolved, *_encoded(raw, **changes)]).startswith(opening)


def _encoded(
    raw: InferenceServerClient, width: int = 0, tags: Sequence[int] = (1,), video: int = 0, audio: int = 0
) -> list[InferInput]:
    """What h3_encode would give, of one row of text."""
    shapes = [tensor.shape[1] for tensor in raw.get_model_metadata("h3_encode").outputs]
    arrays = {
        "TEXT": np.zeros((1, width or shapes[0]), np.float32),
        "TAGS": np.array(tags, np.int64),
        "CONDITION_VIDEO": np.zeros((video, shapes[1]), np.float32),
        "CONDITION_AUDIO": np.zeros((audio, shapes[2]), np.float32),
    }
    return [_numbers(name, array) for name, array in arrays.items()]


def _numbers(name: str, array: NDArray[Any]) -> InferInput:
    tensor = InferInput(name, list(array.shape), {"int64": "INT64", "float32": "FP32"}[str(array.dtype)])
    tensor.set_data_from_numpy(array)
    return tensor


@pytest.mark.parametrize("tokens", [[], [1] * 8193, [-1], [10**9]])
def test_tokens_that_are_not_the_prompt_s_are_refused(
    client: Client, raw: InferenceServerClient, tokens: list[int]
) -> None:
    resolved = _text("RESOLVED", json.dumps(client.resolve(PROMPT, QUICK)).encode())
    sent = [_numbers(name, np.array(tokens, np.int64)) for name in ("TOKENS", "TAGS")]
    media = InferInput("MEDIA", [0], "BYTES")
    media.set_data_from_numpy(np.array([], np.object_))
    assert _message(raw, "h3_encode", [resolved, *sent, media]).startswith("TOKENS: ")


def test_latents_of_another_shape_are_refused(client: Client, raw: InferenceServerClient) -> None:
    resolved = client.resolve(PROMPT, QUICK)
    assert Resolved.model_validate_json(json.dumps(resolved)).latent_frames == 32
    video = InferInput("VIDEO", [1, 24, 31, 16, 16], "FP32")
    video.set_data_from_numpy(np.zeros((1, 24, 31, 16, 16), np.float32))
    audio = InferInput("AUDIO", [1, 2, 32, 178], "FP32")
    audio.set_data_from_numpy(np.zeros((1, 2, 32, 178), np.float32))
    message = _message(raw, "h3_decode", [_text("RESOLVED", json.dumps(resolved).encode()), video, audio])
    assert message.startswith("VIDEO: got '[1, 24, 31, 16, 16]'; ")


def test_a_timeout_cancels(client: Client) -> None:
    with pytest.raises(ClientError) as caught:
        client.generate(PROMPT, {**QUICK, "num_inference_steps": 200}, timeout=1)
    assert caught.value.failure is Failure.TIMEOUT
