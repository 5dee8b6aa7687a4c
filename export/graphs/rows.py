"""The named axes of the denoiser's graphs: how many rows of each kind a request may have."""

from __future__ import annotations

from export.graphs.graph import Axis

TEXT_ROWS = Axis("text_rows", 1, 131_072)
"""L: tokens of the prompt, of which a picture takes up to 16,384."""

VIDEO_ROWS = Axis("video_rows", 1, 262_144)
"""Nv: patches of conditions and target; 69,678 for 15 s of 1344x768, and references on top."""

AUDIO_ROWS = Axis("audio_rows", 1, 16_384)
"""Na: both channels of references and target; 1,206 for 15 s, and references on top."""

ROWS = Axis("rows", 1, 262_144)
"""S: the packed sequence."""

LOCAL_ROWS = Axis("local_rows", 1, 262_144, follows="rows")
"""n: one rank's run of the packed sequence, which may end in padding."""

CHUNK_ROWS = Axis("chunk_rows", 1, 262_144)
"""R: consecutive rows of the packed sequence that go through row-local work together."""

TILES = Axis("tiles", 1, 8_192)
"""T: tiles of up to 64 packed rows; 1,814 for 15 s of 1344x768."""
