"""What `--first`, `--last` and `--ref` make of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3trt.exits import CommandError
from h3trt.media_options import attach
from runtime.media.limits import LIMITS
from runtime.refusal import RequestError


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.png", "clip.mp4", "clip@2.5", "C:x.wav", "odd@name.mp4"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def test_without_media_nothing_is_added(files: Path) -> None:
    attached = attach(None, None, [])
    assert (attached.params, attached.files) == ({}, {})


@pytest.mark.parametrize(
    ("first", "last", "indices", "contents"),
    [
        ("a.png", None, [0], [b"a.png"]),
        (None, "b.png", [-1], [b"b.png"]),
        ("a.png", "b.png", [0, -1], [b"a.png", b"b.png"]),
    ],
)
def test_keyframes(files: Path, first: str | None, last: str | None, indices: list[int], contents: list[bytes]) -> None:
    attached = attach(first, last, [])
    assert attached.params["task"] == "fl2va"
    assert attached.params["frame_indices"] == indices
    assert [item["index"] for item in attached.params["references"]] == list(range(len(contents)))
    assert attached.files == {"image": contents}


def test_references_keep_their_order_and_their_files(files: Path) -> None:
    attached = attach(None, None, ["audio:C:x.wav", "image:b.png", "video:clip.mp4@2.5", "image:a.png"])
    assert attached.params == {
        "task": "ref2va",
        "references": [
            {"type": "audio", "index": 0},
            {"type": "image", "index": 0},
            {"type": "video", "index": 0, "start_time_seconds": 2.5},
            {"type": "image", "index": 1},
        ],
    }
    assert attached.files == {"audio": [b"C:x.wav"], "image": [b"b.png", b"a.png"], "video": [b"clip.mp4"]}


@pytest.mark.parametrize(
    ("text", "content", "start"),
    [
        ("video:clip.mp4", b"clip.mp4", None),
        ("video:clip.mp4@0", b"clip.mp4", 0.0),
        ("video:clip@2.5@0", b"clip@2.5", 0.0),
        ("video:odd@name.mp4", b"odd@name.mp4", None),
        ("video:odd@name.mp4@1", b"odd@name.mp4", 1.0),
    ],
)
def test_a_number_behind_the_last_at_is_where_a_video_begins(
    files: Path, text: str, content: bytes, start: float | None
) -> None:
    attached = attach(None, None, [text])
    assert attached.files == {"video": [content]}
    assert attached.params["references"][0].get("start_time_seconds") == start


def test_an_at_in_the_name_of_an_image_is_its_own(files: Path) -> None:
    assert attach(None, None, ["image:clip@2.5"]).files == {"image": [b"clip@2.5"]}


def test_urls_are_passed_on(files: Path) -> None:
    attached = attach(None, None, ["image:https://example.com/a@2.png", "video:HTTP://example.com/v.mp4@1.5"])
    assert attached.files == {}
    assert attached.params["references"] == [
        {"type": "image", "url": "https://example.com/a@2.png"},
        {"type": "video", "url": "HTTP://example.com/v.mp4", "start_time_seconds": 1.5},
    ]
    assert attach("data:image/png;base64,AA==", None, []).params["references"][0]["url"].startswith("data:")


@pytest.mark.parametrize("text", ["a.png", "picture:a.png", "image:", ":a.png", "Image:a.png"])
def test_a_reference_without_a_kind_is_refused(files: Path, text: str) -> None:
    with pytest.raises(CommandError, match="must be KIND:FILE, KIND being one of image, video, audio"):
        attach(None, None, [text])


def test_keyframes_and_references_do_not_go_together(files: Path) -> None:
    with pytest.raises(CommandError, match="one or the other"):
        attach("a.png", None, ["image:b.png"])


def test_a_missing_file_and_one_that_is_too_large_are_told_before_anything_is_sent(files: Path) -> None:
    with pytest.raises(FileNotFoundError):
        attach(None, None, ["image:none.png"])
    with (files / "large.png").open("wb") as file:
        file.truncate(LIMITS["image"].bytes_maximum + 1)
    with pytest.raises(RequestError, match=r"^large.png: "):
        attach("large.png", None, [])
