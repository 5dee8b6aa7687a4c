"""What the benches that run whole requests, or parts of them, have in common."""

from __future__ import annotations

from runtime.events import Event, Reporter

PROMPT = "A red fox runs over fresh snow at dawn, its steps crunching, a raven calling far away."


def ignore(event: Event) -> None:
    """No progress is shown."""


def quiet() -> Reporter:
    """A reporter that shows nothing."""
    return Reporter(ignore, lambda: 0.0)
