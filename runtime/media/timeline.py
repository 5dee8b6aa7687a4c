"""The 24 frames a second grid: which source frame is shown at each step, by presentation times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from plugins.dimensions import FRAMES_PER_SECOND


def slot(time: Fraction) -> int:
    """The step of the grid that a frame at that time (seconds from the start) is shown from: floor(24 t + 1/2)."""
    return math.floor(time * FRAMES_PER_SECOND + Fraction(1, 2))


def held(times: Sequence[Fraction], count: int) -> list[int]:
    """For each of the first `count` steps, the index of the source frame that is shown: the last whose slot has come.

    times: rising presentation times in seconds from the start; frames before it are negative. Before the first frame's
    slot the first is shown.
    """
    shown, index = [], 0
    slots = [slot(time) for time in times]
    for step in range(count):
        while index + 1 < len(slots) and slots[index + 1] <= step:
            index += 1
        shown.append(index)
    return shown
