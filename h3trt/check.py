"""What `h3trt doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One thing looked at: what was found, whether it suffices, and if not, what mends it."""

    name: str
    good: bool
    found: str
    remedy: str = ""
