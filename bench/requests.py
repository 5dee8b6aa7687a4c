"""What the benches that run whole requests, or parts of them, have in common."""

from __future__ import annotations

from typing import Any

from runtime.contract import CONTAINERS, FIELD
from runtime.mux import MediaOptions

PROMPT = "A red fox runs over fresh snow at dawn, its steps crunching, a raven calling far away."


def default_media(container: str = CONTAINERS[0]) -> MediaOptions:
    """What a request gets that asks for nothing but, perhaps, a container."""
    default: dict[str, Any] = {name: FIELD[name].default for name in ("crf", "preset", "audio_bitrate")}
    return MediaOptions(default["preset"], 1000 * default["audio_bitrate"], default["crf"], container=container)
