"""`/v1/videos` before the real models: the request contract, the clips, cancellation within a step, a stop in order."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from runtime.intake import Intake
from runtime.probe import inspect_mp4
from tests.conftest import H3TRT, Demonstration
from tests.media.clips import picture, saved
from tests.request.vectors import SMALL, VECTORS, Vector
from tests.serving.gateway.conftest import Serving
from tests.serving.test_requests import PROMPT, QUICK, refusal_for_size
from triton_repo.client import Client
from triton_repo.server import TritonServer

SLOW = {**QUICK, "num_inference_steps": 200}


@pytest.fixture(scope="module")
def sync(http: httpx2.Client) -> httpx2.Response:
    """A clip by the synchronous call."""
    answer = http.post("/v1/videos/sync", json={"prompt": PROMPT, **QUICK})
    assert answer.status_code == 200, answer.text
    return answer


def _sendable(vector: Vector) -> bool:
    """In a JSON body the prompt is a key like others."""
    return isinstance(vector.params, dict) and isinstance(vector.prompt, str) and "prompt" not in vector.params


@pytest.mark.parametrize("vector", [pytest.param(one, id=one.name) for one in VECTORS if _sendable(one)])
def test_a_request_resolves_or_is_refused_as_over_grpc(
    http: httpx2.Client, demonstration: Demonstration, vector: Vector
) -> None:
    try:
        body = json.dumps({"prompt": vector.prompt, **vector.params}).encode()
    except UnicodeEncodeError:
        pytest.skip("has no UTF-8")
    answer = http.post("/v1/videos/dry-run", content=body, headers={"Content-Type": "application/json"})
    if vector.refused is not None:
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith(vector.refused.opening)
        assert error["field"] == vector.refused.field
        assert vector.refused.rule in error["message"]
        return
    if (too_large := refusal_for_size(Intake.open(demonstration.store), vector)) is not None:
        assert answer.json()["error"]["message"] == too_large
        return
    assert answer.status_code == 200
    assert {name: answer.json()[name] for name in vector.resolves} == vector.resolves


def test_a_clip_has_the_bytes_of_the_ensemble_and_is_what_its_record_says(
    http: httpx2.Client, client: Client, sync: httpx2.Response
) -> None:
    assert sync.content == client.generate_unary(PROMPT, QUICK).mp4
    job = http.get(f"/v1/videos/{sync.headers['X-Request-Id']}").json()
    assert (job["status"], job["size"], job["num_frames"]) == ("completed", "256x256", 107)
    assert inspect_mp4(sync.content).problems(256, 256, job["num_frames"]) == []
    assert set(job["stage_durations"]) == {"encode", "denoise", "decode"}


def test_a_fragmented_clip_arrives_while_it_is_made(http: httpx2.Client) -> None:
    body = {"prompt": PROMPT, **QUICK, "media": {"container": "fragmented"}}
    pieces: list[bytes] = []
    states: list[str] = []
    with http.stream("POST", "/v1/videos/sync", json=body) as answer:
        path = f"/v1/videos/{answer.headers['X-Request-Id']}"
        for piece in answer.iter_raw():
            pieces.append(piece)
            states.append(http.get(path).json()["status"])
    assert states[0] == "in_progress"
    clip = b"".join(pieces)
    assert inspect_mp4(clip).problems(256, 256, 107) == []
    assert http.get(f"{path}/content").content == clip


def test_parts_of_a_clip_are_served_as_a_player_asks_for_them(http: httpx2.Client, sync: httpx2.Response) -> None:
    path = f"/v1/videos/{sync.headers['X-Request-Id']}/content"
    for wanted, expected in (("bytes=0-99", sync.content[:100]), ("bytes=-50", sync.content[-50:])):
        part = http.get(path, headers={"Range": wanted})
        assert (part.status_code, part.content) == (206, expected)
    assert http.get(path, headers={"Range": f"bytes={len(sync.content)}-"}).status_code == 416
    assert http.get(path).headers["Accept-Ranges"] == "bytes"


def test_a_file_of_a_form_reaches_the_model(http: httpx2.Client) -> None:
    image = {"first_frame": ("a.png", saved(picture(300, 260), "PNG"), "image/png")}
    form = {"prompt": PROMPT, "width": "256", "height": "256", "seconds": "4"}
    resolved = http.post("/v1/videos/dry-run", data=form, files=image).json()
    assert (resolved["task"], [one["role"] for one in resolved["references"]]) == ("fl2va", ["first"])


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8001/", "http://169.254.169.254/latest", "file:///etc/passwd", "/etc/passwd", "//x/y"]
)
def test_a_url_of_a_reference_leads_nowhere_that_the_operator_did_not_allow(http: httpx2.Client, url: str) -> None:
    body = {"prompt": PROMPT, **SMALL, "task": "ref2va", "image_reference": {"image_url": url}}
    answer = http.post("/v1/videos", json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "image_reference")


def test_a_deadline_that_no_server_could_meet_is_refused_at_once(http: httpx2.Client, sync: httpx2.Response) -> None:
    """By what the requests before it took here; a wait for the server's turn is refused in other words."""
    answer = http.post("/v1/videos/dry-run", json={"prompt": PROMPT, **SLOW, "deadline": 0.5})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"]) == (422, "deadline", "deadline"), error
    within = http.post("/v1/videos/dry-run", json={"prompt": PROMPT, **QUICK, "deadline": 3600})
    assert within.json()["estimate"]["seconds"] > 0


def _started(http: httpx2.Client, params: dict[str, Any]) -> str:
    """The id of a job that has begun to denoise."""
    job = http.post("/v1/videos", json={"prompt": PROMPT, **params}).json()
    for event in _events(http, job["id"]):
        if event.get("stage") == "denoise" and event["index"] >= 1:
            return str(job["id"])
    raise AssertionError("the job ended")


def _events(http: httpx2.Client, job_id: str) -> Iterator[dict[str, Any]]:
    with http.stream("GET", f"/v1/videos/{job_id}/events") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def _seconds_until_the_server_works_on(http: httpx2.Client) -> float:
    """For a new job; it is cancelled then."""
    began = time.monotonic()
    job_id = _started(http, SLOW)
    taken = time.monotonic() - began
    assert http.delete(f"/v1/videos/{job_id}").status_code == 200
    return taken


def test_a_deletion_frees_the_server_within_a_step(http: httpx2.Client) -> None:
    first = _started(http, SLOW)
    deleted = http.delete(f"/v1/videos/{first}")
    assert (deleted.status_code, deleted.json()["deleted"]) == (200, True)
    assert _seconds_until_the_server_works_on(http) < 15  # 200 steps would take minutes
    assert http.get(f"/v1/videos/{first}").status_code == 404


def test_a_client_that_goes_away_frees_the_server(http: httpx2.Client) -> None:
    with pytest.raises(httpx2.ReadTimeout):
        http.post("/v1/videos/sync", json={"prompt": PROMPT, **SLOW}, timeout=1)
    assert _seconds_until_the_server_works_on(http) < 15
    newest = http.get("/v1/videos", params={"limit": 1}).json()["data"][0]
    assert newest["error"]["code"] == "cancelled"


def test_a_signal_lets_the_accepted_job_finish_and_a_new_gateway_serves_it(
    server: TritonServer, serving: Serving, tmp_path: Path
) -> None:
    options = ["--triton", server.endpoints.grpc, "--port", "0", "--folder", str(tmp_path / "jobs")]
    process = subprocess.Popen(
        [*H3TRT, "gateway", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found is not None
    with httpx2.Client(base_url=found[0], timeout=60) as http:
        job_id = _started(http, {**QUICK, "num_inference_steps": 2})
        process.send_signal(signal.SIGTERM)
        while (refused := http.post("/v1/videos", json={"prompt": PROMPT, **QUICK})).status_code == 200:
            http.delete(f"/v1/videos/{refused.json()['id']}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "1 accepted jobs were finished, 0 failed" in errors
    with serving(folder=tmp_path / "jobs") as http:
        assert http.get(f"/v1/videos/{job_id}").json()["status"] == "completed"
        assert http.get(f"/v1/videos/{job_id}/content").content[4:8] == b"ftyp"
