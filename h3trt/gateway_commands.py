"""The command that serves `/v1/videos` over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h3trt import console, paths
from h3trt.amounts import bytes_of
from h3trt.exits import CommandError, Exit


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(gateway)


def gateway(
    triton: Annotated[str, typer.Option(help="The Triton server's gRPC endpoint, host:port.")] = "127.0.0.1:8001",
    host: Annotated[str, typer.Option(help="Address to listen on; another than loopback needs keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8080,
    folder: Annotated[Path, typer.Option(help="Where jobs and clips are kept; made where missing.")] = paths.GATEWAY,
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys, NAME KEY a line. Default: none are asked for.", exists=True)
    ] = None,
    without_keys: Annotated[
        bool, typer.Option("--without-keys", help="Let other machines in without keys; ask for them in front.")
    ] = False,
    queue: Annotated[int, typer.Option(min=1, max=64, help="Jobs that may wait; more are refused.")] = 8,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Jobs that Triton has at the same time.")] = 2,
    sync_timeout: Annotated[float, typer.Option(min=1, help="Seconds that /v1/videos/sync may take.")] = 600,
    keep_days: Annotated[float, typer.Option(min=0, help="Days that an ended job is kept.")] = 7,
    keep: Annotated[str, typer.Option(help="Disk for finished clips; the oldest go first.")] = "20GiB",
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that accepted jobs get when stopping.")] = 600,
) -> None:
    """Serve /v1/videos over HTTP, and a web page, in front of a Triton server, until Ctrl-C or SIGTERM.

    Stopping refuses new jobs and lets the accepted ones finish; a second Ctrl-C ends them at once. Its log goes to
    standard error, one JSON object a line.
    """
    from gateway.keys import Keys
    from gateway.server import serve
    from gateway.settings import GatewaySettings
    from triton_repo.logs import set_up

    set_up()
    settings = GatewaySettings(
        triton=triton,
        folder=folder,
        host=host,
        port=port,
        queue=queue,
        concurrency=concurrency,
        sync_seconds=sync_timeout,
        keep_seconds=keep_days * 86400,
        keep_bytes=bytes_of("--keep", keep),
        drain_seconds=drain_timeout,
        keys=None if keys is None else Keys.read(keys),
        any_host=without_keys,
    )
    drained = serve(settings, lambda url: console.line(f"gateway {url}   (the same address in a browser is a page)"))
    if drained is None:
        raise CommandError("stopped without letting the accepted jobs finish", Exit.CANCELLED)
    console.heading(f"stopped: {drained.completed} accepted jobs were finished, {drained.failed} failed")
    if drained.cut:
        raise CommandError(f"{drained.cut} jobs were cut off after {drain_timeout:g} s", Exit.SERVER)
