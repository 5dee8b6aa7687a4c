"""What a body may be, how its fields become the models' inputs, and where it is cut off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.form import asked_of_form, asked_of_json, value_of
from gateway.models import Asked
from gateway.multipart import Part
from gateway.settings import BODY_BYTES
from runtime.media.limits import LIMITS
from tests.gateway.conftest import Connection, Start
from tests.gateway.scripted import PARAMS, ScriptedModels

PNG, MP4, WAV = b"\x89PNG\r\n\x1a\n1234", b"\0\0\0\x18ftypisom1234", b"RIFF\0\0\0\0WAVEfmt "


class Recorded(ScriptedModels):
    """Keeps what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Asked | None = None

    async def resolve(self, asked: Asked, seconds: float, request_id: str) -> Any:
        self.asked = asked
        return await super().resolve(Asked(asked.prompt, PARAMS, {}), seconds, request_id)


async def _sent(start: Start, data: dict[str, Any], files: Any = ()) -> tuple[int, dict[str, Any], Asked | None]:
    models = Recorded()
    async with start(models) as one:
        parts = [(name, (None, text)) for name, text in data.items()] + list(files)
        answer = await one.client.post("/v1/videos/dry-run", files=parts)
        return answer.status_code, answer.json(), models.asked


@pytest.mark.anyio
async def test_texts_of_a_form_become_the_types_of_their_fields(start: Start) -> None:
    given = {
        "prompt": "5",
        "seconds": "4",
        "size": "256x256",
        "num_inference_steps": "4",
        "guidance_scale": "1.5",
        "snap": "true",
        "frame_indices": "[0, -1]",
        "extra_params": '{"crf": 20}',
        "user": "7",
        "seed": "many",
    }
    status, _, asked = await _sent(start, given)
    assert status == 200
    assert asked is not None
    assert asked.prompt == "5"
    assert asked.params == {
        "seconds": "4",
        "size": "256x256",
        "num_inference_steps": 4,
        "guidance_scale": 1.5,
        "snap": True,
        "frame_indices": [0, -1],
        "extra_params": {"crf": 20},
        "user": "7",
        "seed": "many",
    }


@pytest.mark.anyio
async def test_files_keep_the_order_in_which_they_came(start: Start) -> None:
    files = [
        ("input_references", ("v.mp4", MP4, "video/mp4")),
        ("input_references", ("a.png", PNG, "application/octet-stream")),
        ("input_references", ("noname", WAV, "application/octet-stream")),
        ("input_references", ("b", PNG + b"b", "image/png")),
    ]
    status, _, asked = await _sent(start, {"prompt": "p"}, files)
    assert status == 200
    assert asked is not None
    assert asked.files == {"video": [MP4], "image": [PNG, PNG + b"b"], "audio": [WAV]}
    assert asked.params["references"] == [
        {"type": "video", "index": 0},
        {"type": "image", "index": 0},
        {"type": "audio", "index": 0},
        {"type": "image", "index": 1},
    ]


@pytest.mark.anyio
async def test_frames_are_the_ends_of_a_clip_in_whatever_order_they_come(start: Start) -> None:
    files = [("last_frame", ("l.png", PNG + b"l", "image/png")), ("first_frame", ("f.png", PNG, "image/png"))]
    _, _, asked = await _sent(start, {"prompt": "p"}, files)
    assert asked is not None
    assert asked.files == {"image": [PNG, PNG + b"l"]}
    assert asked.params == {"task": "fl2va", "frame_indices": [0, -1]}
    _, _, asked = await _sent(start, {"prompt": "p"}, files[:1])
    assert asked is not None
    assert asked.params == {"task": "fl2va", "frame_indices": [-1]}


IMAGE = ("a.png", PNG, "image/png")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("data", "files", "field", "rule"),
    [
        ({"seed": "1"}, [], "prompt", "missing"),
        ({"prompt": ""}, [], "prompt", "must be a string of 1 to 7000 characters"),
        ({"prompt": "x" * 7001}, [], "prompt", "this one has 7001"),
        ({"prompt": "p"}, [("input_refrence", IMAGE)], "input_refrence", "unknown field"),
        ({"prompt": "p"}, [("seed", IMAGE)], "seed", "must be text"),
        ({"prompt": "p", "input_reference": "text"}, [], "input_reference", "must be a file"),
        ({"prompt": "p"}, [("input_reference", IMAGE)] * 2, "input_reference", "given twice"),
        ({"prompt": "p"}, [("input_reference", IMAGE), ("input_references", IMAGE)], "input_reference", "not beside"),
        ({"prompt": "p", "image_reference": "{}"}, [("input_references", IMAGE)], "image_reference", "not beside"),
        ({"prompt": "p"}, [("first_frame", IMAGE), ("input_reference", IMAGE)], "input_reference", "not beside"),
        ({"prompt": "p"}, [("first_frame", ("v.mp4", MP4, "video/mp4"))], "first_frame", "must be an image"),
        ({"prompt": "p"}, [("input_reference", ("a", b"#!/bin/sh", ""))], "input_reference", "must be image: "),
    ],
)
async def test_a_form_that_is_refused_names_the_field(
    start: Start, data: dict[str, Any], files: list[Any], field: str, rule: str
) -> None:
    status, answer, asked = await _sent(start, data, files)
    assert status == 400, answer
    assert answer["error"]["field"] == field
    assert rule in answer["error"]["message"]
    assert asked is None


@pytest.mark.anyio
async def test_a_part_is_cut_off_at_its_own_limit(start: Start) -> None:
    sound = ("a.wav", WAV + bytes(LIMITS["audio"].bytes_maximum), "audio/wav")
    status, answer, _ = await _sent(start, {"prompt": "p"}, [("input_reference", sound)])
    assert (status, answer["error"]["field"]) == (413, "input_reference")
    status, answer, _ = await _sent(start, {"prompt": "p", "user": "x" * 100_000})
    assert (status, answer["error"]["field"]) == (413, "user")


@pytest.mark.anyio
async def test_a_body_is_cut_off_while_it_arrives_whatever_it_said_of_its_length(start: Start) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 20
            yield b" " * (1 << 20)

    async with start() as one:
        kind = {"Content-Type": "application/json"}
        answer = await one.client.post("/v1/videos", content=endless(), headers=kind)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert sent <= BODY_BYTES + (2 << 20)
        answer = await one.client.post("/v1/videos", content=b"{}", headers={**kind, "Content-Length": "99999999999"})
        assert answer.status_code == 413


@pytest.mark.anyio
async def test_a_body_that_comes_to_a_halt_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.body.BODY_SECONDS", 0.05)
    async with start() as one:
        halted = Connection(one, "POST", "/v1/videos", body=None)
        assert await halted.status() == 408


@pytest.mark.anyio
async def test_a_body_that_drips_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, none of them late."""
    monkeypatch.setattr("gateway.body.BODY_SECONDS", 0.2)

    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.02)

    async with start() as one:
        kind = {"Content-Type": "application/json"}
        assert (await one.client.post("/v1/videos", content=drip(), headers=kind)).status_code == 408


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("text/plain", b"{}", 415),
        ("", b"{}", 415),
        ("application/x-www-form-urlencoded", b"prompt=p", 415),
        ("application/json", b"", 400),
        ("application/json", b"[]", 400),
        ("application/json", b'{"prompt": "a", "prompt": "b"}', 400),
        ("application/json", b'{"prompt": 5}', 400),
        ("application/json", b'{"prompt": "\xff"}', 400),
        ("multipart/form-data", b"", 400),
        ("multipart/form-data; boundary=x", b"--y\r\n", 400),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na', 400),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Type: text/plain\r\n\r\na\r\n--x--\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"A: b\r\n" * 1000, 400),
    ],
)
async def test_a_body_that_is_none_is_refused(start: Start, kind: str, body: bytes, status: int) -> None:
    async with start() as one:
        answer = await one.client.post("/v1/videos", content=body, headers={"Content-Type": kind})
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_many_parts_are_too_many(start: Start) -> None:
    status, answer, _ = await _sent(start, {f"field{number}": "1" for number in range(200)})
    assert (status, answer["error"]["code"]) == (413, "too_large")


def test_a_text_cannot_bring_other_fields_in() -> None:
    assert value_of("extra_params", '{}, "seed": 1') == '{}, "seed": 1'
    assert value_of("seed", "1") == 1
    assert value_of("prompt_like", "plain") == "plain"


def test_json_and_form_ask_for_the_same() -> None:
    params = {"size": "256x256", "num_inference_steps": 4, "extra_params": {"seed": 5}}
    form = [Part("prompt", None, "", bytearray(b"p"))]
    form += [
        Part(name, None, "", bytearray((value if isinstance(value, str) else json.dumps(value)).encode()))
        for name, value in params.items()
    ]
    body = json.dumps({"prompt": "p", **params}).encode()
    assert asked_of_form(form).fingerprint() == asked_of_json(body).fingerprint()


def test_the_fingerprint_tells_requests_apart() -> None:
    one = Asked("p", {"seed": 1}, {"image": [b"a", b"b"]})
    others = [
        Asked("q", one.params, one.files),
        Asked("p", {"seed": 2}, one.files),
        Asked("p", one.params, {"image": [b"b", b"a"]}),
        Asked("p", one.params, {"image": [b"ab"]}),
        Asked("p", one.params, {"audio": [b"a", b"b"]}),
    ]
    assert len({asked.fingerprint() for asked in [one, *others]}) == len(others) + 1
