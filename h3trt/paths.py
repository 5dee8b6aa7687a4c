"""Where commands put what they are given no place for: `build/` for what can be made again, `out/` for clips."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path("build/checkpoint")
OUTPUT = Path("out")


def engine_store(profile: str) -> Path:
    """The engine store of a profile, given by name or as a file."""
    return Path("build/engines") / Path(profile).stem


def triton(profile: str) -> Path:
    """The folder of a profile's model repository and server log."""
    return Path("build/triton") / Path(profile).stem
