"""Every line of a log is one JSON object with the fields that all lines have."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from triton_repo.logs import Log, set_up
from triton_repo.server_log import as_json


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    stream, root = io.StringIO(), logging.getLogger()
    before = root.handlers[:], root.level
    set_up(stream)
    yield stream
    root.handlers[:], root.level = before


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_fields_of_a_source_and_of_an_event_are_in_its_line(written: io.StringIO) -> None:
    Log("h3_stream").of(request="abc").info("done\nreally", seconds=1.5)
    (line,) = _lines(written)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "source": "h3_stream",
        "event": "done\nreally",
        "request": "abc",
        "seconds": 1.5,
    }


def test_a_fault_is_one_line_with_its_traceback(written: io.StringIO) -> None:
    try:
        raise KeyError("place")
    except KeyError as error:
        Log("h3_stream").error("incident", error, incident="1f")
    (line,) = _lines(written)
    assert (line["level"], line["incident"]) == ("error", "1f")
    assert line["traceback"].endswith("KeyError: 'place'")


def test_what_any_logger_says_with_extra_fields_is_written_alike(written: io.StringIO) -> None:
    logging.getLogger("h3.gateway").info("job accepted", extra={"request_id": "video_1"})
    (line,) = _lines(written)
    assert (line["source"], line["event"], line["request"]) == ("h3.gateway", "job accepted", "video_1")


def test_tritons_own_lines_become_objects_of_the_same_fields() -> None:
    own = '2026-11-30T08:50:09Z W 3261 pinned_memory_manager.cc:273] "No \\"pinned\\" memory"'
    assert json.loads(as_json(own)) == {
        "time": "2026-11-30T08:50:09Z",
        "level": "warning",
        "source": "tritonserver",
        "event": 'No \\"pinned\\" memory',
    }
    assert json.loads(as_json("+---+"))["event"] == "+---+"
    assert as_json('{"event": "done"}') == '{"event": "done"}'
