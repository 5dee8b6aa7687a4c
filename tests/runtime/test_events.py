"""Progress events and cancellation."""

from __future__ import annotations

import threading

import pytest

from runtime.events import Cancellation, Cancelled, Event, Reporter, Units


def test_reporter_stamps_events_with_the_time_since_it_was_made():
    times = iter([100.0, 100.0, 102.5])
    events: list[Event] = []
    report = Reporter(events.append, lambda: next(times))
    report("denoise", 0, 4)
    report("denoise", 1, 4)
    assert events == [Event("denoise", 0, 4, 0.0), Event("denoise", 1, 4, 2.5)]


def test_events_survive_json():
    event = Event("decode", 3, 28, 1.25)
    assert event.to_json() == '{"stage": "decode", "index": 3, "total": 28, "seconds": 1.25}'
    assert Event.from_json(event.to_json()) == event


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stage": "denoise", "index": 9, "total": 4, "seconds": 0}'])
def test_what_is_no_event_is_refused(text):
    with pytest.raises(ValueError):
        Event.from_json(text)


def test_an_unknown_stage_is_refused_with_the_legal_ones():
    with pytest.raises(ValueError, match="prepare, encode, denoise, decode"):
        Event("upscale", 0, 1, 0.0)


def test_cancelling_from_another_thread_stops_the_next_unit_of_work():
    cancellation = Cancellation()
    cancellation.raise_if_cancelled("forward 1 of 4")
    thread = threading.Thread(target=cancellation.cancel)
    thread.start()
    thread.join()
    with pytest.raises(Cancelled, match="before forward 2 of 4"):
        cancellation.raise_if_cancelled("forward 2 of 4")


def test_a_callers_check_is_asked_until_it_says_yes_and_then_stays():
    answers = iter([False, True, False])
    cancellation = Cancellation(lambda: next(answers))
    assert not cancellation.cancelled
    assert cancellation.cancelled
    assert cancellation.cancelled
    assert next(answers) is False


def test_units_are_counted_over_all_parts_of_a_stage() -> None:
    events: list[Event] = []
    units = Units("encode", 5, Reporter(events.append, lambda: 0.0), Cancellation())
    with units.one("the first"):
        pass
    units.reach(3)
    units.reach(2)
    with units.one("the fourth"):
        pass
    units.reach(5)
    assert [(event.index, event.total) for event in events] == [(0, 5), (1, 5), (3, 5), (4, 5), (5, 5)]


def test_a_unit_that_fails_is_not_counted_and_one_after_the_cancellation_does_not_begin() -> None:
    events: list[Event] = []
    cancellation = Cancellation()
    units = Units("encode", 2, Reporter(events.append, lambda: 0.0), cancellation)
    with pytest.raises(ValueError, match="broken"), units.one("the first"):
        raise ValueError("broken")
    cancellation.cancel()
    with pytest.raises(Cancelled, match="before the second"), units.one("the second"):
        pytest.fail("it must not begin")
    assert [event.index for event in events] == [0]
