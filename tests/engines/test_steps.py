"""What a machine cannot do is put off; what another one has finished is taken as it is; nothing half done is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from engines.steps import RECORDS, Deferred, Ledger, Product, Record, Step, StepEvent, StepFailed

Records = Mapping[str, Record]


def ledger(root: Path, events: list[StepEvent] | None = None, resumes: bool = False) -> Ledger:
    return Ledger(root, lambda step: f"again {step}", (events if events is not None else []).append, resumes)


def fact(records: Records) -> Product:
    return Product({"answer": 42}, {"answers/{sha}.txt": b"42"})


def cannot(records: Records) -> Product:
    raise Deferred("there is no GPU here")


def test_a_step_that_cannot_be_done_here_puts_off_all_that_waits_for_it_and_nothing_else(tmp_path: Path) -> None:
    steps = [
        Step("first", {}, fact),
        Step("gpu", {}, cannot, ("first",)),
        Step("other", {}, fact),
        Step("last", {}, fact, ("gpu", "other")),
    ]
    reports = {report.name: report for report in ledger(tmp_path).run(steps)}
    assert {name: r.status for name, r in reports.items()} == {
        "first": "built",
        "gpu": "deferred",
        "other": "built",
        "last": "deferred",
    }
    assert reports["gpu"].facts == {"deferred": "there is no GPU here"}
    assert reports["last"].facts == {"deferred": "waits for gpu"}
    assert not (tmp_path / RECORDS / "gpu.json").exists()


def test_what_was_put_off_is_done_where_it_can_be(tmp_path: Path) -> None:
    ledger(tmp_path).run([Step("gpu", {}, cannot), Step("last", {}, fact, ("gpu",))])
    reports = ledger(tmp_path).run([Step("gpu", {}, fact), Step("last", {}, fact, ("gpu",))])
    assert [report.status for report in reports] == ["built", "built"]


def test_resuming_takes_what_was_done_with_other_versions_of_libraries(tmp_path: Path) -> None:
    def steps(torch: str) -> list[Step]:
        return [Step("emit", {}, fact, here={"torch": torch}), Step("plan", {"torch": torch}, fact)]

    ledger(tmp_path).run(steps("1"))
    assert [r.status for r in ledger(tmp_path, resumes=True).run(steps("2"))] == ["reused", "built"]
    assert [r.status for r in ledger(tmp_path).run(steps("2"))] == ["built", "reused"]


def test_resuming_does_not_take_what_was_done_of_something_else(tmp_path: Path) -> None:
    """Such as the graph of another checkpoint, whose build in this store was not finished."""

    def steps(checkpoint: str) -> list[Step]:
        return [
            Step("quantise", {"checkpoint": checkpoint}, fact, here={}),
            Step("compare", {}, fact, ("quantise",), here={}),
        ]

    ledger(tmp_path).run(steps("one"))
    assert [r.status for r in ledger(tmp_path, resumes=True).run(steps("one"))] == ["reused", "reused"]
    assert [r.status for r in ledger(tmp_path, resumes=True).run(steps("another"))] == ["built", "built"]


def test_resuming_does_not_take_a_file_that_has_changed(tmp_path: Path) -> None:
    steps = [Step("emit", {}, fact, here={})]
    ledger(tmp_path).run(steps)
    next((tmp_path / "answers").iterdir()).write_text("43")
    assert [r.status for r in ledger(tmp_path, resumes=True).run(steps)] == ["built"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"answer": 42', b'"answer": 43'),
        (b'"answer": 42', b""),
        (b"answers/", b"../answers/"),
        (b"answers/", b"/answers/"),
        (b"answers/", b"\xff\xfe"),
        (b"{", b"[" * 100_000),
    ],
)
def test_a_record_that_was_damaged_is_none_and_its_step_is_done_again(tmp_path: Path, old: bytes, new: bytes) -> None:
    steps = [Step("first", {}, fact)]
    ledger(tmp_path).run(steps)
    file = tmp_path / RECORDS / "first.json"
    whole = file.read_bytes()
    assert old in whole
    file.write_bytes(whole.replace(old, new, 1))
    (report,) = ledger(tmp_path).run(steps)
    assert (report.status, report.facts) == ("built", {"answer": 42})
    assert file.read_bytes() == whole


def test_a_large_product_is_moved_from_the_step_s_own_directory_which_goes(tmp_path: Path) -> None:
    events: list[StepEvent] = []
    made = ledger(tmp_path, events)

    def write(records: Records) -> Product:
        file = made.work.directory("plan") / "plan"
        file.write_bytes(b"engine")
        made.work.report("plan", "tactics", 3, 7)
        return Product({}, {"engines/a.{sha}.plan": file})

    (report,) = made.run([Step("plan", {}, write)])
    assert report.status == "built"
    (file,) = (tmp_path / "engines").iterdir()
    assert file.read_bytes() == b"engine"
    assert not (tmp_path / RECORDS / "plan.work").exists()
    assert StepEvent(3, 7, "plan: tactics", "working") in events


def test_what_a_failed_step_left_in_its_directory_goes(tmp_path: Path) -> None:
    made = ledger(tmp_path)

    def fail(records: Records) -> Product:
        (made.work.directory("plan") / "half").write_bytes(b"eng")
        raise OSError("No space left on device")

    with pytest.raises(StepFailed, match="step plan failed: No space left on device"):
        made.run([Step("plan", {}, fail)])
    assert not (tmp_path / RECORDS / "plan.work").exists()
