"""The pages name commands, options, targets and files that there are, and say what each block needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from h3trt.cli import app
from tests.docs.commands import PAGES, ROOT, SHELL, Block, blocks, inline_commands

BLOCKS = [block for page in PAGES for block in blocks(page)]
MAKEFILE = (ROOT / "Makefile").read_text()
VARIABLES = set(re.findall(r"\$\(value (\w+)\)", MAKEFILE)) | {"PYTHON", "VENV"}
TARGETS = set(re.findall(r"^(\w+):", MAKEFILE, re.MULTILINE))


def check(words: list[str]) -> None:
    """Raises where a command of the program or a target of make is not what there is."""
    program = words[0].rpartition("/")[2]
    if program == "h3trt":
        _check_program(words[1:])
    if program == "make":
        assert {word for word in words[1:] if "=" not in word and not word.startswith("-")} <= TARGETS, words
        assert {word.partition("=")[0] for word in words[1:] if "=" in word} <= VARIABLES, words


def _check_program(words: list[str]) -> None:
    command: Any = get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    # Values are not looked at: pages have stand-ins for them.
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help", "-h"}
    for word in words:
        assert not word.startswith("-") or word in ("-", "--") or word.partition("=")[0] in known, words


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_says_whether_it_runs_or_what_it_needs(block: Block) -> None:
    assert block.marker, f"{block.name}: <!-- runs --> or <!-- needs: ... --> must stand above it"
    if block.language == SHELL:
        commands = list(block.commands())
        assert commands
        for words in commands:
            check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_are_those_of_the_program(page: Path) -> None:
    for words in inline_commands(page):
        check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "words", [["h3trt", "serve", "--no-such"], ["h3trt", "serv"], ["make", "no-such"], ["make", "perf", "PROFIL=x"]]
)
def test_what_there_is_not_is_seen(words: list[str]) -> None:
    with pytest.raises(AssertionError):
        check(words)


def test_a_block_without_a_marker_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- runs -->\n\nA sentence.\n\n    h3trt --help\n\n<!-- needs: a GPU -->\n\n```sh\nh3trt bench\n```\n"
    )
    assert [(block.marker, block.text) for block in blocks(page)] == [
        ("", "h3trt --help"),
        ("needs: a GPU", "h3trt bench"),
    ]


def test_the_readme_leads_to_every_page() -> None:
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(re.findall(r"\]\(([^)#]+)", PAGES[0].read_text()))


def test_the_folders_that_a_page_names_hold_tests() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(tests/[\w/.]+)`", page.read_text(encoding="utf-8"))}
    assert named
    for name in named:
        path = ROOT / name
        assert any(path.rglob("test_*.py")) if path.is_dir() else path.is_file(), name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 160


def test_make_shows_every_target_that_is_for_users() -> None:
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"make {target} " in shown for target in TARGETS - {"help"})
