"""The seconds and units of a request's stages, told by its events."""

from __future__ import annotations

from runtime.events import Event, Stage
from triton_repo.stage_clock import StageClock


class Told:
    """A stage clock whose time is what the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = StageClock(lambda: self.now)

    def at(self, now: float, stage: Stage, index: int) -> int:
        """The units that an event adds."""
        self.now = now
        return self.clock(Event(stage, index, 9, now))[0]


def test_all_seconds_of_a_request_belong_to_a_stage() -> None:
    told = Told()
    for now, stage, index in [(1, "encode", 0), (3, "encode", 9), (4, "denoise", 0), (8, "denoise", 1)]:
        told.at(now, stage, index)  # type: ignore[arg-type]
    told.at(9, "decode", 0)
    told.at(11, "decode", 9)
    told.now = 12
    assert told.clock.finish() == 12
    # Before the first event it is being prepared; what follows a stage's last event is still that stage's.
    assert told.clock.seconds == {"prepare": 1, "encode": 3, "denoise": 5, "decode": 3}


def test_units_are_counted_once_and_over_all_outputs() -> None:
    told = Told()
    added = [told.at(0, "decode", index) for index in (0, 4, 9, 9, 0, 9)]
    assert added == [0, 4, 5, 0, 0, 9]
    assert told.clock.units == {"decode": 18}
