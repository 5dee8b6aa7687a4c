"""The command that probes a running server, for supervisors and for people."""

from __future__ import annotations

from typing import Annotated

import typer

from h3trt import console
from h3trt.serve_commands import UrlOption


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(health)


def health(
    url: UrlOption = "127.0.0.1:8001",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that the server gets to answer.")] = 10,
    clip: Annotated[
        bool, typer.Option("--clip", help="Have the smallest clip made too, if the server is idle.")
    ] = False,
) -> None:
    """Ask a server whether it would serve a request now, by a dry run; exit code 0 if so, 5 if not."""
    from triton_repo.health import check

    console.line(f"{url}: {check(url, timeout, clip)}")
