"""Where the commands write: results to standard output, progress and errors to standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

Stages = Callable[[Mapping[str, Any]], None]
"""Takes the progress events of a request, as JSON objects."""


class Step(Protocol):
    """A step of a longer piece of work: its number from 1, how many there are if known, "started" or how it ended.

    While it is "working", the numbers and the name are those of a part of it.
    """

    @property
    def index(self) -> int: ...
    @property
    def total(self) -> int | None: ...
    @property
    def name(self) -> str: ...
    @property
    def status(self) -> str: ...


@dataclass(frozen=True)
class Moment:
    """A step as the commands themselves report it."""

    index: int
    total: int | None
    name: str
    status: str


WIDEST = 1000
"""Columns of a table that are never exceeded."""

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


def error(text: str) -> None:
    """One error, as its own text says it."""
    err.print("error:", style="bold red", end=" ")
    err.print(text, markup=False)


def heading(text: str) -> None:
    """The start of one part of a longer command."""
    err.print(text, style="bold", markup=False)


def line(text: str) -> None:
    """One line of a result."""
    out.print(text, markup=False)


def table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table of results, as wide as its cells: no figure is cut, in a file or on a narrow terminal."""
    shown = Table(title=Text(title), title_justify="left")
    for column in columns:
        shown.add_column(Text(column), no_wrap=True)
    for row in rows:
        shown.add_row(*map(Text, row))
    Console(width=WIDEST, highlight=False).print(shown)


def _columns() -> tuple[Any, ...]:
    return (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


@contextmanager
def stages() -> Iterator[Stages]:
    """One bar for each stage of a request, moved by its progress events; plain lines where there is no terminal."""
    with Progress(*_columns(), console=err, disable=not err.is_terminal) as progress:
        bars: dict[str, Any] = {}

        def show(event: Mapping[str, Any]) -> None:
            stage = event["stage"]
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=event["total"])
            progress.update(bars[stage], completed=event["index"])
            if not err.is_terminal and event["index"] == event["total"]:
                err.print(f"{event['seconds']:7.1f} s  {stage}: {event['total']} done", markup=False)

        yield show


@contextmanager
def steps() -> Iterator[Callable[[Step], None]]:
    """Progress of a list of steps: call it as each one starts and ends; "working" moves a second bar."""
    with Progress(*_columns(), console=err, disable=not err.is_terminal) as progress:
        bar = progress.add_task("", total=None)
        part = progress.add_task("", total=None, visible=False)

        def show(step: Step) -> None:
            started = step.status == "started"
            if step.status == "working":
                progress.update(part, description=step.name, total=step.total, completed=step.index, visible=True)
                return
            progress.update(bar, description=step.name, total=step.total, completed=step.index - started)
            progress.update(part, visible=False)
            if not started:
                progress.console.print(f"  {step.status:8} {step.name}", markup=False)

        yield show
