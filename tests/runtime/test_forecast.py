"""An estimate says what it rests on and null where it rests on nothing; deadlines are held against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.store import EngineStore, Manifest
from runtime.estimate import Queue
from runtime.forecast import Forecaster, Late
from runtime.refusal import RequestError
from runtime.request import Resolved, resolve, restore
from runtime.timings import Recorder, identity
from runtime.work import Work, work_of

SMALL = {"aspect_ratio": "1:1", "width": 256, "height": 256, "duration": 4, "num_inference_steps": 4}
ROWS = 20
SECOND = 1_000_000


@pytest.fixture(scope="module")
def manifest(store: Path) -> Manifest:
    return EngineStore.open(store).manifest


class Clock:
    """Microseconds that pass when told."""

    def __init__(self) -> None:
        self.now = 50 * SECOND

    def __call__(self) -> int:
        return self.now


def _resolved(manifest: Manifest, **params: object) -> Resolved:
    return resolve("a fox", {**SMALL, **params}, manifest.dimensions)


def _works(manifest: Manifest, resolved: Resolved) -> list[Work]:
    return list(work_of(resolved, ROWS, manifest.dimensions).values())


@pytest.fixture
def measured(manifest: Manifest, tmp_path: Path) -> Path:
    """Records of a request that took 1, 4 and 2 seconds."""
    works = _works(manifest, _resolved(manifest))
    done = dict(zip(works, (1.0, 4.0, 2.0), strict=True))
    Recorder(tmp_path / "h3_stream.json", identity(manifest)).add(done)
    return tmp_path


def test_nothing_measured_is_said_to_be_unknown_and_holds_no_deadline_up(manifest: Manifest, tmp_path: Path) -> None:
    forecaster = Forecaster(manifest, tmp_path / "none")
    resolved = _resolved(manifest, deadline=1)
    estimate = forecaster.estimate(resolved, ROWS, 7 << 20)
    assert (estimate.seconds, estimate.stages["denoise"], estimate.memory_bytes) == (None, None, 7 << 20)
    assert "denoise of quality lossless: not measured yet" in estimate.basis
    forecaster.check(resolved, estimate)


def test_the_same_request_is_expected_to_take_what_it_took_and_more_steps_more(
    manifest: Manifest, measured: Path
) -> None:
    forecaster = Forecaster(manifest, measured)
    same = forecaster.estimate(_resolved(manifest), ROWS, 0)
    assert same.stages == {"encode": 1.0, "denoise": 4.0, "decode": 2.0}
    assert same.seconds == 7.0
    assert "denoise of quality lossless: 1 request of 1 times the work" in same.basis
    more = forecaster.estimate(_resolved(manifest, num_inference_steps=8, num_outputs_per_prompt=2), ROWS, 0)
    assert more.stages == {"encode": 1.0, "denoise": 16.0, "decode": 4.0}
    unknown = forecaster.estimate(_resolved(manifest, preset="slow"), ROWS, 0)
    assert (unknown.seconds, unknown.stages["decode"], unknown.stages["denoise"]) == (None, None, 4.0)


def test_a_deadline_that_no_idle_server_could_meet_is_refused_with_the_nearest(
    manifest: Manifest, measured: Path
) -> None:
    forecaster = Forecaster(manifest, measured)
    resolved = _resolved(manifest, deadline=5)
    with pytest.raises(RequestError) as caught:
        forecaster.check(resolved, forecaster.estimate(resolved, ROWS, 0))
    assert str(caught.value) == "deadline: got 5.0; the request takes about 7.0 s on this server; nearest legal: 8"
    legal = _resolved(manifest, deadline=8)
    forecaster.check(legal, forecaster.estimate(legal, ROWS, 0))


def test_a_queue_and_time_that_has_passed_make_a_request_late(manifest: Manifest, measured: Path) -> None:
    clock = Clock()
    forecaster = Forecaster(manifest, measured, clock)
    resolved = _resolved(manifest, deadline=10)
    behind = forecaster.estimate(resolved, ROWS, 0, Queue(waiting=1, running=1, seconds=10.5))
    with pytest.raises(Late, match=r"late: the deadline of 10 s .* before it take about 10.5 s, it takes about 7.0 s"):
        forecaster.check(resolved, behind)
    alone = forecaster.estimate(resolved, ROWS, 0, Queue(waiting=0, running=0, seconds=0))
    clock.now += 2 * SECOND
    forecaster.check(resolved, alone)
    clock.now += 2 * SECOND
    with pytest.raises(Late, match=r"4.0 s have passed, it takes about 7.0 s"):
        forecaster.check(resolved, alone)
    forecaster.check(resolved, alone, ("denoise", "decode"))


def test_a_resolved_request_with_its_estimate_comes_back_over_the_wire(manifest: Manifest, measured: Path) -> None:
    resolved = _resolved(manifest, deadline=30)
    estimate = Forecaster(manifest, measured).estimate(resolved, ROWS, 0)
    sent = resolved.model_copy(update={"estimate": estimate})
    assert restore(sent.model_dump_json(), manifest.dimensions) == sent


def test_a_longer_clip_is_more_than_proportionally_more_work(manifest: Manifest) -> None:
    """The rows of attention are squared."""
    short, long = (_resolved(manifest, duration=seconds) for seconds in (5, 10))
    less, more = (work_of(one, ROWS, manifest.dimensions)["denoise"].amount for one in (short, long))
    rows = (long.video_rows + long.audio_rows + ROWS) / (short.video_rows + short.audio_rows + ROWS)
    assert more > rows * less
