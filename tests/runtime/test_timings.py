"""What was measured says what to expect of work of another size, and survives a restart of the same engines only."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.timings import Record, Recorder, predict, read
from runtime.work import Work


def test_seconds_are_in_proportion_to_the_nearest_measured_amount() -> None:
    record = Record(identity="a")
    record.add(Work("denoise", 100), 10)
    record.add(Work("denoise", 10_000), 500)
    near, far = predict([record], Work("denoise", 200)), predict([record], Work("denoise", 20_000))
    assert near is not None
    assert far is not None
    assert (near.seconds, near.factor, near.count) == (20, 2, 1)
    assert far.seconds == 1000


def test_nothing_is_said_of_work_that_was_not_measured() -> None:
    record = Record(identity="a")
    record.add(Work("decode with preset slow", 100), 10)
    assert predict([record], Work("decode with preset veryfast", 100)) is None


def test_of_several_processes_the_one_that_knows_most_is_believed() -> None:
    one, other = Record(identity="a"), Record(identity="a")
    one.add(Work("denoise", 100), 1)
    for _ in range(3):
        other.add(Work("denoise", 100), 2)
    found = predict([one, other], Work("denoise", 100))
    assert found is not None
    assert (found.seconds, found.count) == (2, 3)


def test_a_server_that_has_become_slower_is_soon_believed_to_be() -> None:
    record = Record(identity="a")
    for seconds in [1.0] * 20 + [2.0] * 5:
        record.add(Work("denoise", 100), seconds)
    found = predict([record], Work("denoise", 100))
    assert found is not None
    assert found.seconds == pytest.approx(2, abs=0.2)


def test_a_record_outlives_its_process_and_not_its_engines(tmp_path: Path) -> None:
    file = tmp_path / "timings" / "h3_stream.json"
    Recorder(file, "engines").add({Work("denoise", 100): 1.0})
    Recorder(file, "engines").add({Work("denoise", 100): 1.0})
    record = read(file, "engines")
    assert record is not None
    found = predict([record], Work("denoise", 100))
    assert found is not None
    assert found.count == 2
    assert read(file, "others") is None
    Recorder(file, "others").add({Work("denoise", 100): 7.0})
    assert read(file, "engines") is None


def test_a_torn_file_is_no_record(tmp_path: Path) -> None:
    file = tmp_path / "h3_stream.json"
    file.write_text('{"identity": "engines", "averages": {"denoise": {"1"')
    assert read(file, "engines") is None
    assert read(tmp_path / "missing", "engines") is None
