"""The comparison of the tail's two sides: the source is the same each time, and bytes that differ are told."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bench import tail, tail_run
from runtime.mux import MediaOptions

OPTIONS = MediaOptions(crf=18, preset="ultrafast", audio_bitrate=128_000)


def runs(digest: str = "a", **changes: float) -> list[dict[str, Any]]:
    one = {"wall_s": 4.0, "decode_s": 1.0, "encode_s": 3.0, "first_piece_s": 4.0, "mp4_bytes": 7, "sha256": digest}
    return [{**one, **changes}]


def test_both_sides_make_the_same_file_of_the_synthetic_source() -> None:
    source, waveform = tail_run.synthetic(256, 256, 39), tail_run.tone(39)
    sides = [side(source, waveform, (256, 256), OPTIONS) for side in tail_run.SIDES.values()]
    assert sides[0].digest.hexdigest() == sides[1].digest.hexdigest()
    assert sides[0].size == sides[1].size > 0
    assert sides[0].decode >= 3 * tail_run.CHUNK_SECONDS
    assert 0 < sides[0].first_piece <= sides[0].wall


def test_the_source_moves_and_repeats() -> None:
    source = tail_run.synthetic(256, 256, 18)
    first, again = (np.concatenate([chunk() for chunk in source()]) for _ in range(2))
    assert first.shape == (18, 384, 256)
    assert (first == again).all()
    assert not (first[0] == first[1]).all()


def test_the_summary_says_what_was_won_and_what_bounds_it() -> None:
    found = tail._summary(
        {"serial": runs(), "overlapped": runs(wall_s=3.2), "fragmented": runs("b", first_piece_s=0.5)}
    )
    assert found["serial / overlapped"] == pytest.approx(4 / 3.2)
    assert found["overlapped / max(decode, encode)"] == pytest.approx(3.2 / 3)
    measured = {"what": "x", "host": {"cores": 2, "load average": 0.1}, "clip": found}
    assert "| clip | 1.00 | 3.00 | 4.00 | 3.20 | 1.25 | 1.07 | 0.50 |  |" in tail.table(
        json.loads(json.dumps(measured))
    )


def test_bytes_that_differ_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="differ"):
        tail._summary({"serial": runs(), "overlapped": runs("b"), "fragmented": runs("c")})
