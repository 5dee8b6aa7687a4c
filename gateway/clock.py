"""The two clocks of the gateway, passed in so that tests can turn them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """`wall` is shown to people and decides nothing, for it may jump; `monotonic` measures. Both in seconds."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
