"""Requests with media to the real server: every limit, hostile files, all tasks in turn, the cache, memory left."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from runtime.probe import inspect_mp4
from tests.conftest import report_figure
from tests.media.clips import noise, picture, saved, wav
from tests.media.hostile import DECODED, HOSTILE
from tests.request.media_vectors import MEDIA_VECTORS
from tests.request.vectors import Vector
from tests.serving.conftest import Traces
from tests.serving.media_files import MEDIA_LIMITS, REF, Files, Limit, files_of
from tests.serving.test_life_cycle import Background
from triton_repo.client import Client, ClientError, Failure
from triton_repo.metric_table import CACHE
from triton_repo.server import TritonServer
from triton_repo.shared_memory import ROOT as SHARED_MEMORY

PROMPT = "A red fox trots through fresh snow."
SMALL = {"width": 256, "height": 256, "duration": 4, "num_inference_steps": 1, "seed": 5}
IMAGE, OTHER = saved(picture(300, 260), "PNG"), saved(picture(260, 300), "JPEG")
VOICE = wav(noise(2.1, 16000, 1), 16000)
TASKS: list[tuple[dict[str, Any], Files]] = [
    ({**SMALL, "aspect_ratio": "1:1"}, {}),
    (SMALL, {"image": [IMAGE, OTHER]}),
    ({**REF, "seed": 5}, {"image": [IMAGE], "audio": [VOICE]}),
]
INPUTS = {"image": "IMAGES", "video": "VIDEOS", "audio": "AUDIOS"}

CPU_SECONDS, GROWTH = 2, 300 << 20
"""What a hostile file may cost of processor time and memory."""

LEFT = 1.02
"""What mixed requests may leave of memory, beside what the first six left."""

SETTLED = 0.001
"""Of memory: what two looks, half a second apart, differ by when nothing is given back any more."""


def _elements(name: str, values: list[bytes]) -> InferInput:
    tensor = InferInput(name, [len(values)], "BYTES")
    array = np.empty(len(values), np.object_)
    array[:] = values
    tensor.set_data_from_numpy(array)
    return tensor


def _refused(client: Client, params: dict[str, Any], files: Files) -> str:
    """The text of a refusal by h3_prepare."""
    with pytest.raises(ClientError) as caught:
        client.resolve(PROMPT, params, files=files)
    assert caught.value.failure is Failure.INVALID
    return str(caught.value)


def _on_the_wire(vector: Vector) -> bool:
    """Not those of a file that no limit lets be, nor those of a URL that leads to nothing."""
    short = any(one.kind == "video" and one.seconds < 2 for one in vector.media)
    return not short and (vector.refused is not None or "url" not in str(vector.params))


@pytest.mark.parametrize("vector", [pytest.param(one, id=one.name) for one in MEDIA_VECTORS if _on_the_wire(one)])
def test_a_request_with_media_resolves_or_is_refused_with_field_value_and_rule(client: Client, vector: Vector) -> None:
    files = files_of(vector.media)
    if vector.refused is None:
        # A small canvas and small references: what a machine's memory admits is tested elsewhere.
        small = {"width": 256, "height": 256} if "width" not in vector.resolves else {}
        resolved = client.resolve(
            PROMPT, {"reference_short_edge": 256, "duration": 4, **small, **vector.params}, files=files
        )
        facts = {name: value for name, value in vector.resolves.items() if name in ("task", "width", "outputs", "seed")}
        assert {name: resolved[name] for name in facts} == facts
        return
    message = _refused(client, vector.params, files)
    assert message.startswith(vector.refused.opening)
    assert vector.refused.rule in message


@pytest.mark.parametrize("limit", [pytest.param(one, id=one.name) for one in MEDIA_LIMITS])
def test_a_limit_of_media_lets_in_what_is_at_it_and_refuses_what_is_past_it(client: Client, limit: Limit) -> None:
    assert client.resolve(PROMPT, {**REF, **limit.params}, files=limit.within())["task"] == "ref2va"
    message = _refused(client, {**REF, **limit.beyond_params}, limit.beyond())
    assert message.startswith(f"{limit.where}: ")
    assert limit.rule in message


def test_a_url_leads_nowhere_unless_the_operator_says_so(client: Client) -> None:
    for url in ("https://example.com/a.png", "file:///etc/passwd", "/etc/passwd", "http://127.0.0.1/a.png"):
        message = _refused(client, {**REF, "image_reference": {"image_url": url}}, {})
        assert message.startswith("image_reference: ")
        assert "must be a data: URL" in message or "its host must be one that the operator allows" in message


class Stub:
    """The process of one model, and what it takes."""

    def __init__(self, server: TritonServer, model: str) -> None:
        children = psutil.Process(server.pid).children(recursive=True)
        self._process = next(one for one in children if f"/{model}/" in " ".join(one.cmdline()))
        self._files = Path(f"/proc/{self._process.pid}")
        self.restart()

    def restart(self) -> None:
        """Begins to measure."""
        (self._files / "clear_refs").write_text("5")
        self._memory, self._times = self._process.memory_info().rss, self._process.cpu_times()

    def taken(self) -> tuple[float, int]:
        """Seconds of processor time, and bytes at the height, since then."""
        now = self._process.cpu_times()
        peak = re.search(r"VmHWM:\s+(\d+)", (self._files / "status").read_text())
        assert peak is not None
        seconds = now.user + now.system - self._times.user - self._times.system
        return seconds, (int(peak[1]) << 10) - self._memory


def test_hostile_files_are_refused_at_little_cost_and_the_next_request_works(
    client: Client, server: TritonServer
) -> None:
    stub = Stub(server, "h3_prepare")
    for name, (kind, data) in HOSTILE.items():
        if name in DECODED:
            continue
        beside = {"image": [IMAGE]} if kind == "audio" else {}
        stub.restart()
        message = _refused(client, REF, {**beside, kind: [data]})
        seconds, growth = stub.taken()
        assert message.startswith(f"{INPUTS[kind]}[0]: "), name
        assert seconds < CPU_SECONDS, name
        assert growth < GROWTH, name
    assert client.resolve(PROMPT, REF, files={"image": [IMAGE]})["task"] == "ref2va"


def test_what_only_decoding_shows_ends_the_request_and_the_next_one_works(client: Client, server: TritonServer) -> None:
    stub = Stub(server, "h3_stream")
    # Videos show it after their first clips, whose encoding takes longer than all these tests.
    stills = [name for name in sorted(DECODED) if HOSTILE[name][0] == "image"]
    assert stills
    for name in stills:
        kind, data = HOSTILE[name]
        stub.restart()
        with pytest.raises(ClientError) as caught:
            client.generate(PROMPT, REF, files={kind: [data]})
        seconds, growth = stub.taken()
        assert caught.value.failure is Failure.INVALID, name
        assert growth < GROWTH, name
        assert seconds < CPU_SECONDS, name
    params, files = TASKS[0]
    assert client.generate(PROMPT, params, files=files).mp4


@pytest.mark.parametrize(("params", "files"), TASKS, ids=["t2va", "fl2va", "ref2va"])
def test_one_service_answers_every_task_alike_on_both_models(
    client: Client, params: dict[str, Any], files: Files
) -> None:
    params = {**params, "num_outputs_per_prompt": 2}
    stream = client.generate(PROMPT, params, files=files)
    unary = client.generate_unary(PROMPT, params, files=files)
    assert unary.mp4s == stream.mp4s
    # What it would take depends on what the server has done before.
    assert {**unary.resolved, "estimate": None} == {**stream.resolved, "estimate": None}
    assert len(set(stream.mp4s)) == 2
    for mp4 in stream.mp4s:
        assert inspect_mp4(mp4).problems(256, 256, 107) == []
    other = client.generate(PROMPT, {**params, "seed": 6, "num_outputs_per_prompt": 1}, files=files)
    assert other.mp4 == stream.mp4s[1], "output i has seed + i"


def _metric(server: TritonServer, name: str) -> float:
    with urllib.request.urlopen(f"http://{server.endpoints.metrics}/metrics") as answer:
        text = answer.read().decode()
    found = re.search(rf'^{name}\{{model="h3_stream"\}} (\S+)$', text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def _settled_counts(server: TritonServer) -> dict[str, float]:
    """What the cache did, once it is published, which follows the answer: when two looks half a second apart agree."""
    seen: dict[str, float] = {}
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        last, seen = seen, {count: _metric(server, metric.name) for count, metric in CACHE.items()}
        if seen == last:
            break
        time.sleep(0.5)
    return seen


def test_a_repeated_reference_and_prompt_come_from_the_cache_and_the_metrics_say_so(
    client: Client, server: TritonServer
) -> None:
    params, files = TASKS[2]
    first = client.generate("A fox that nobody asked for before.", params, files=files).mp4
    before = _settled_counts(server)
    assert client.generate("A fox that nobody asked for before.", params, files=files).mp4 == first
    after = _settled_counts(server)
    # Two references and the prompt.
    assert after == {**before, "hits": before["hits"] + 3}
    assert 0 < after["bytes"] < 256 << 20


def test_files_that_are_not_the_resolved_request_s_are_refused(client: Client, raw: InferenceServerClient) -> None:
    """h3_encode can be called by itself."""
    _, files = TASKS[1]
    inputs = [
        _elements("PROMPT", [PROMPT.encode()]),
        _elements("PARAMS", [b'{"width": 256, "height": 256, "duration": 4}']),
        _elements("IMAGES", [IMAGE, OTHER]),
    ]
    prepared = raw.infer("h3_prepare", inputs)
    assert list(prepared.as_numpy("MEDIA")) == list(files["image"])
    sent = [_elements("RESOLVED", [prepared.as_numpy("RESOLVED")[0]])]
    for name in ("TOKENS", "TAGS"):
        array = prepared.as_numpy(name)
        sent.append(InferInput(name, list(array.shape), "INT64"))
        sent[-1].set_data_from_numpy(array)
    for media, text in (([IMAGE], "MEDIA: got '1 files'"), ([OTHER, IMAGE], r"MEDIA\[0\]: .*file of the resolved")):
        with pytest.raises(InferenceServerException, match=text) as caught:
            raw.infer("h3_encode", [*sent, _elements("MEDIA", media)])
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_twenty_mixed_requests_leave_what_six_left(client: Client, server: TritonServer) -> None:
    """Both times the last request was of one task: what it worked with may not be given back yet."""
    _mixed(client, range(6))
    before = _memory(server)
    _mixed(client, range(6, 21))
    assert _memory(server) < LEFT * before


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_mixed_requests_and_four_at_once_leave_what_six_left(
    client: Client, server: TritonServer, request: pytest.FixtureRequest
) -> None:
    _mixed(client, range(6))
    before, files = _memory(server), _shared_memory(server)
    _mixed(client, range(6, 201))
    sequential = _memory(server)
    four = [Background(lambda seed=seed: _small(server, seed)) for seed in range(4)]
    assert all(isinstance(one.join(), bytes) for one in four)
    at_once = _memory(server)
    # The last one is of the same task as before the first look.
    _mixed(client, range(195, 201))
    after = _memory(server)
    looks = "; ".join(f"{look / 1e6:,.1f} MB" for look in (before, sequential, at_once, after))
    report_figure(request.config, f"memory after 6 requests, 201, four at once, six more: {looks}")
    assert after < LEFT * before
    assert _shared_memory(server) == files


def _small(server: TritonServer, seed: int) -> bytes:
    params, files = TASKS[0]
    with Client(server.endpoints.grpc) as client:
        return client.generate(PROMPT, {**params, "seed": seed}, files=files).mp4


def _mixed(client: Client, numbers: range) -> None:
    for index in numbers:
        params, files = TASKS[index % len(TASKS)]
        client.generate(PROMPT, {**params, "seed": index}, files=files)


def _shared_memory(server: TritonServer) -> dict[str, int]:
    """The sizes of its files in /dev/shm."""
    return {name: (SHARED_MEMORY / name).stat().st_size for name in Traces(server.pid).shared_memory()}


def _memory(server: TritonServer) -> int:
    """Bytes that the server and its models have to themselves once they give back no more, which follows an answer."""
    process = psutil.Process(server.pid)
    last, seen = 0, 1
    deadline = time.monotonic() + 30
    while abs(seen - last) > SETTLED * seen and time.monotonic() < deadline:
        time.sleep(0.5)
        last, seen = seen, sum(one.memory_full_info().uss for one in (process, *process.children(recursive=True)))
    return seen
