"""Hostile files are refused in bounded memory and time, and leave nothing behind that hurts the next one."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from runtime.media.facts import ImageFacts
from runtime.media.probe import probe
from runtime.refusal import RequestError
from tests.media.clips import picture, saved
from tests.media.hostile import DECODED, HOSTILE

ROOT = Path(__file__).parent.parent.parent
PEAK_MB = 300


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """How each file ended, from a process each that may use two seconds of a processor."""
    files = tmp_path_factory.mktemp("hostile") / "files.pickle"
    files.write_bytes(pickle.dumps(HOSTILE))
    command = [sys.executable, "-m", "tests.media.measure", str(files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


def test_there_are_thirty_of_them_and_more() -> None:
    assert len(HOSTILE) >= 30
    assert {kind for kind, _ in HOSTILE.values()} == {"image", "video", "audio"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_naming_its_field(name: str, outcomes: dict[str, dict[str, object]]) -> None:
    outcome = outcomes[name]
    assert outcome["stage"] == ("decode" if name in DECODED else "probe"), outcome["error"]
    assert outcome["field"] == "IMAGES[3]"
    assert "\n" not in str(outcome["error"])
    assert 40 < len(str(outcome["error"])) < 400


def test_no_hostile_file_takes_more_than_300_mb(outcomes: dict[str, dict[str, object]]) -> None:
    assert {name: one["peak_mb"] for name, one in outcomes.items() if int(str(one["peak_mb"])) >= PEAK_MB} == {}


def test_a_good_file_is_read_after_all_the_hostile_ones() -> None:
    for kind, data in HOSTILE.values():
        with suppress(RequestError):
            probe(data, kind, "IMAGES[0]")
    assert probe(saved(picture(), "PNG"), "image", "IMAGES[0]") == ImageFacts(width=300, height=260)
