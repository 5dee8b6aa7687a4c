"""The Makefile passes values on as they are, and runs nothing that is in them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Writes each argument it is given, ended by a byte that none of them holds.
FAKE = '#!/bin/sh\nfor argument in "$@"; do printf "%s\\001" "$argument"; done\n'

HOSTILE = [
    'it\'s "quoted" and `touch ran` and $(touch ran)',
    "$HOME costs $5, $$10, $(shell touch ran) and ${PATH}",
    "two\nlines \\ and a # mark",
    "--looks-like-an-option",
    "",
    "naïve 狐 🦊",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The Makefile beside an environment whose h3trt only shows its arguments."""
    binary = tmp_path / ".venv" / "bin" / "h3trt"
    binary.parent.mkdir(parents=True)
    binary.write_text(FAKE)
    binary.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / ".installed").touch()
    return tmp_path


# Nothing of a make that runs these tests: it hands its own variables down.
BARE = {"PATH": "/usr/bin:/bin"}


def _make(folder: Path, *arguments: str, **environment: str) -> list[str]:
    result = subprocess.run(
        ["make", "-s", *arguments],
        cwd=folder,
        env={**BARE, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split("\1")[:-1]


@pytest.mark.parametrize("prompt", HOSTILE)
def test_a_prompt_arrives_as_it_was_typed(folder: Path, prompt: str) -> None:
    expected = ["generate", "--seconds", "5", "--seed", "1", "--", prompt]
    assert _make(folder, "generate", f"PROMPT={prompt}", "SECONDS=5", "SEED=1") == expected
    assert _make(folder, "generate", PROMPT=prompt, SECONDS="5", SEED="1") == expected
    assert not (folder / "ran").exists()


def test_every_value_of_generate_reaches_its_option(folder: Path) -> None:
    values = {
        "SECONDS": "8.7",
        "ASPECT_RATIO": "1:1",
        "WIDTH": "256",
        "HEIGHT": "320",
        "SEED": "7",
        "FORWARDS": "4",
        "OUT": "a b.mp4",
    }
    options = [part for name, value in values.items() for part in (f"--{name.lower().replace('_', '-')}", value)]
    given = [f"{name}={value}" for name, value in values.items()]
    assert _make(folder, "generate", "PROMPT=p", *given) == ["generate", *options, "--", "p"]


def test_paths_and_profiles_arrive_as_they_were_typed(folder: Path) -> None:
    path = "a $(shell touch ran) 'b'"
    assert _make(folder, "engines", f"CHECKPOINT={path}", "PROFILE=x y") == [
        "engines",
        "build",
        "--profile",
        "x y",
        "--checkpoint",
        path,
    ]
    assert not (folder / "ran").exists()


def test_set_up_is_not_repeated_until_the_requirements_change(folder: Path) -> None:
    assert subprocess.run(["make", "-q", "setup"], cwd=folder, env=BARE).returncode == 0
    (folder / ".venv" / ".installed").unlink()
    assert subprocess.run(["make", "-q", "setup"], cwd=folder, env=BARE).returncode == 1
