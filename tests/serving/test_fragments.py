"""A fragmented clip comes in pieces while it is made, and is the file that the unary call gives."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from h3trt.cli import app
from h3trt.growing_files import GrowingFiles, in_fragments
from runtime.probe import inspect_mp4
from tests.mp4.boxes import tracks
from tests.request.vectors import SMALL
from triton_repo.client import Client, Generated
from triton_repo.server import TritonServer

PROMPT = "A red fox trots through fresh snow."
QUICK = {**SMALL, "num_inference_steps": 1, "seed": 5}
FRAGMENTED = {**QUICK, "media": {"container": "fragmented"}}


@pytest.fixture(scope="module")
def streamed(server: TritonServer) -> tuple[Generated, list[Any]]:
    """A fragmented clip, and what came on its way: stages of events, and pieces."""
    came: list[Any] = []
    with Client(server.endpoints.grpc) as one:
        clip = one.generate(
            PROMPT,
            FRAGMENTED,
            lambda event: came.append((event["stage"], event["index"])),
            fragments=lambda index, piece: came.append((index, piece)),
        )
    return clip, came


def test_fragments_are_the_file_that_the_unary_call_gives(client: Client, streamed: tuple[Generated, Any]) -> None:
    clip, came = streamed
    pieces = [piece for index, piece in came if isinstance(piece, bytes)]
    assert b"".join(pieces) == clip.mp4
    assert client.generate_unary(PROMPT, FRAGMENTED).mp4 == clip.mp4
    report = inspect_mp4(clip.mp4)
    assert report.problems(256, 256, 107) == []
    assert report.fragments >= len(pieces) > 4


def test_fragments_hold_what_a_whole_file_holds(client: Client, streamed: tuple[Generated, Any]) -> None:
    whole = tracks(client.generate(PROMPT, QUICK).mp4)
    for handler, track in tracks(streamed[0].mp4).items():
        assert track.samples == whole[handler].samples


def test_the_first_fragment_comes_while_later_frames_are_decoded(streamed: tuple[Generated, list[Any]]) -> None:
    clip, came = streamed
    first = next(place for place, (_, piece) in enumerate(came) if isinstance(piece, bytes))
    assert ("decode", 6) in came[first:]
    assert clip.first_fragment is not None


def test_all_outputs_come_in_pieces_under_their_index(client: Client, streamed: tuple[Generated, Any]) -> None:
    pieces: dict[int, bytes] = {0: b"", 1: b""}

    def add(index: int, piece: bytes) -> None:
        pieces[index] += piece

    clip = client.generate(PROMPT, {**FRAGMENTED, "num_outputs_per_prompt": 2}, fragments=add)
    assert tuple(pieces.values()) == clip.mp4s
    assert clip.mp4s[0] == streamed[0].mp4


class Stop(Exception):
    """Raised in a callback."""


def test_a_receiver_that_fails_ends_its_request_and_no_other(client: Client, streamed: tuple[Generated, Any]) -> None:
    def refuse(index: int, piece: bytes) -> None:
        raise Stop

    with pytest.raises(Stop):
        client.generate(PROMPT, FRAGMENTED, fragments=refuse)
    assert client.generate(PROMPT, FRAGMENTED).mp4 == streamed[0].mp4


def test_the_command_writes_a_file_that_grows(
    server: TritonServer, tmp_path: Path, streamed: tuple[Generated, Any]
) -> None:
    out = tmp_path / "clip.mp4"
    options = ["--seconds", "4", "--aspect-ratio", "1:1", "--width", "256", "--height", "256", "--seed", "5"]
    target = ["--forwards", "1", "--url", server.endpoints.grpc, "--out", str(out), "--stream"]
    result = CliRunner().invoke(app, ["generate", PROMPT, *options, *target])
    assert result.exit_code == 0, result.output
    assert "first fragment after" in result.output
    assert out.read_bytes() == streamed[0].mp4


def test_a_growing_file_can_be_read_before_it_is_whole_and_goes_when_the_request_fails(tmp_path: Path) -> None:
    with contextlib.suppress(Stop), GrowingFiles(lambda index: tmp_path / f"{index}.mp4") as files:
        files.add(0, b"ab")
        files.add(1, b"xy")
        files.add(0, b"cd")
        assert (tmp_path / "0.mp4").read_bytes() == b"abcd"
        assert (tmp_path / "1.mp4").read_bytes() == b"xy"
        raise Stop
    assert list(tmp_path.iterdir()) == []


def test_the_container_is_added_to_what_else_is_asked_of_the_media() -> None:
    assert in_fragments({"seed": 1, "media": {"crf": 20}})["media"] == {"crf": 20, "container": "fragmented"}
    assert in_fragments({"media": 3})["media"] == 3
