"""What perf_analyzer 2.60 and aiperf 0.13 write becomes points; a point that did not settle says so everywhere."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from bench.perf import aiperf, analyzer, summary
from bench.perf.analyzer import AnalyzerError, Load
from bench.perf.install import Analyzer
from bench.perf.point import Window, unstable
from bench.perf.workload import Gates

GATES = Gates(stability=10, variation=5, span=10)
LOAD = Load("p", {"duration": 4}, seconds=4, visit=1, clip=4.5, concurrencies=range(1, 3), requests=3)

OUTPUT = """\
Request concurrency: 1
  Pass [1] throughput: 0.22 infer/sec. p95 latency: 4817389 usec
  Pass [2] throughput: 0.22 infer/sec. p95 latency: 4777670 usec
  Pass [3] throughput: 0.22 infer/sec. p95 latency: 4800000 usec
  Client:\x20
    Request count: 9
    Throughput: 0.218024 infer/sec
  Server:\x20
    Inference count: 9
    Successful request count: 9
Request concurrency: 2
  Pass [1] throughput: 0.10 infer/sec. p95 latency: 20582051 usec
  Pass [2] throughput: 0.20 infer/sec. p95 latency: 10582051 usec
  Pass [3] throughput: 0.40 infer/sec. p95 latency: 10582051 usec
  Client:\x20
    Request count: 12
"""
HEADER = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv"
)
REPORT = f"""{HEADER},p50 latency,p90 latency,p95 latency,p99 latency,request/response,response wait
1,0.218024,11,10301,2,284,4449016,4670,4,4602789,4777670,4817389,4817389,15,4464245
2,0.233408,10,3794202,6,243,4384024,5254,4,8280116,9736732,10582051,10582051,14,8183704
"""
ENCODE = f"""{HEADER}
1,0.242249,0,2,116,23,23242,129,0
2,0.233408,0,2,3769320,38,21563,128,0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a sweep of two concurrencies left."""
    (tmp_path / "output.txt").write_text(OUTPUT)
    (tmp_path / "sweep.csv").write_text(REPORT)
    (tmp_path / "h3_encode_v1.sweep.csv").write_text(ENCODE)
    return tmp_path


def measured(folder: Path) -> dict[str, Any]:
    """A whole result, as the command makes it of the points."""
    return {
        "what": "clips",
        "excludes": "start",
        "client": "perf_analyzer",
        "profile": "cpu",
        "machine": {"gpus": [], "processors": 2, "processor": "x", "load": [0.5]},
        "workload": {"gates": GATES.model_dump()},
        "points": [point.as_json(GATES) for point in analyzer.read(folder, LOAD)],
    }


def test_queues_are_read_from_the_steps_and_not_from_the_ensemble(folder: Path) -> None:
    one, two = analyzer.read(folder, LOAD)
    assert (one.requests, one.p50, one.p95, one.throughput) == (9, 4.602789, 4.817389, 0.218024)
    assert one.rtf == pytest.approx(4.602789 / 4.5)
    assert two.queue == pytest.approx(3.769320)
    assert two.steps["h3_encode"].compute == pytest.approx((38 + 21563 + 128) / 1e6)
    assert [window.throughput for window in two.windows] == [0.1, 0.2, 0.4]


def test_a_concurrency_without_a_report_is_an_error(folder: Path) -> None:
    (folder / "sweep.csv").write_text(REPORT.rsplit("\n2,", 1)[0] + "\n")
    with pytest.raises(AnalyzerError, match=r"nothing for concurrency \[2\]"):
        analyzer.read(folder, LOAD)


def test_a_failed_run_is_told_in_its_own_words(tmp_path: Path) -> None:
    program = Analyzer(("sh", "-c", "echo 'error: no model h3' >&2; exit 99"), "test", "0")
    with pytest.raises(AnalyzerError, match="ended with 99: error: no model h3"):
        analyzer.run(program, "127.0.0.1:1", LOAD, tmp_path)


def test_windows_that_differ_are_named_with_their_gate() -> None:
    even = [Window(1.0, 2.0)] * 3
    assert unstable(even, GATES) == []
    assert unstable(even[:2], GATES) == ["2 windows of 3"]
    slower = [*even[:2], Window(0.8, 2.0)]
    assert [text.split()[0] for text in unstable(slower, GATES)] == ["throughput", "CV", "span"]
    assert unstable([*even[:2], Window(1.0, 3.0)], GATES) == ["p95 max/min 50.0% > 10%"]


def test_a_point_that_did_not_settle_is_marked_in_every_file(folder: Path, tmp_path: Path) -> None:
    files = summary.write(measured(folder), tmp_path / "out", "perf_cpu")
    assert [file.name for file in files] == ["perf_cpu.json", "perf_cpu.csv", "perf_cpu.md", "perf_cpu.svg"]
    points = json.loads(files[0].read_text())["points"]
    assert [bool(point["unstable"]) for point in points] == [False, True]
    with files[1].open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["concurrency"] for row in rows] == ["1", "2"]
    assert rows[1]["h3_encode_queue_s"] == "3.76932"
    assert rows[1]["unstable"].startswith("throughput max/min 300.0%")
    table = files[2].read_text()
    assert "| 4.50 | 1 | 1 | 9 | 13.08 | 4.60 | 4.82 | 1.02 |" in table
    assert "| no: throughput max/min 300.0% > 10%" in table
    assert "1 of 2 points did not settle." in table
    assert "did not settle" in files[3].read_text()


def test_a_plot_of_settled_points_has_no_mark(folder: Path, tmp_path: Path) -> None:
    result = measured(folder)
    result["points"] = result["points"][:1]
    assert "did not settle" not in summary.write(result, tmp_path / "out", "x")[3].read_text()


def _record(start: float, end: float) -> dict[str, Any]:
    return {"metadata": {"request_start_ns": int(start * 1e9), "request_end_ns": int(end * 1e9)}}


def test_requests_of_aiperf_are_cut_into_windows_by_their_ends() -> None:
    records = [_record(start, start + 2) for start in (5, 1, 3, 7, 9, 11)]
    assert aiperf.windows(records) == (Window(0.5, 2.0), Window(0.5, 2.0), Window(0.5, 2.0))


def test_a_request_of_aiperf_that_failed_is_no_point(tmp_path: Path) -> None:
    (tmp_path / aiperf.SUMMARY).write_text("{}")
    failed = _record(1, 2) | {"error": {"message": "429 queue full"}}
    (tmp_path / aiperf.RECORDS).write_text(json.dumps(_record(1, 2)) + "\n" + json.dumps(failed) + "\n")
    with pytest.raises(aiperf.AiperfError, match="1 of 2 requests failed: 429 queue full"):
        aiperf.read(tmp_path, LOAD, 1)
