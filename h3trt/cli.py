"""The program `h3trt`: its sub-commands, their errors as one line each, and their exit codes."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from h3trt import (
    adapter_commands,
    bench_commands,
    build_commands,
    console,
    gateway_commands,
    health_commands,
    perf_commands,
    plan_commands,
    serve_commands,
)
from h3trt.exits import MEANINGS, exit_code, message


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a command in order, as Ctrl-C does."""


class _Commands(TyperGroup):
    """Runs a sub-command and turns the errors that a user or operator can mend into a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            code = exit_code(error)
            if code is None:
                raise
            console.error(message(error))
            raise typer.Exit(code) from None


def _epilog() -> str:
    codes = "\n\n".join(f"{code:3d}  {meaning}" for code, meaning in MEANINGS.items())
    return f"Exit codes:\n\n{codes}"


app = typer.Typer(
    cls=_Commands,
    help="A compiler for MiniMax H3: a checkpoint becomes engines, a Triton server, and MP4 clips with sound.",
    epilog=_epilog(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
plan_commands.register(app)
bench_commands.register(app)
build_commands.register(app)
adapter_commands.register(app)
serve_commands.register(app)
gateway_commands.register(app)
health_commands.register(app)
perf_commands.register(app)


def main() -> None:
    """Entry point of the program."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    app()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(f"stopped by {signal.Signals(number).name}")
