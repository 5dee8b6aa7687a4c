"""A server as the commands run one: rendered for a store, started, watched, and told of on the console."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h3trt import console
from h3trt.amounts import amount, bytes_of
from h3trt.console import Moment
from triton_repo.metric_table import RANK_WEIGHTS
from triton_repo.names import DEFAULT_CONDITION_CACHE, STREAM
from triton_repo.scrape import samples

if TYPE_CHECKING:
    from triton_repo.repository import RepositorySettings
    from triton_repo.watchdog import RestartPolicy, Watchdog

DEFAULT_CACHE = f"{DEFAULT_CONDITION_CACHE >> 20} MiB"


@contextmanager
def running_server(
    folder: Path,
    store: Path,
    chosen: RepositorySettings,
    run: Mapping[str, Any],
    policy: RestartPolicy | None = None,
    log_json: bool = False,
) -> Iterator[Watchdog]:
    """A ready server of the store, its repository rendered anew in `folder`, run with these `ServerSettings`.

    Raises StoreError and ServerError.
    """
    from triton_repo.control import UNREACHABLE, read_metrics
    from triton_repo.names import PUBLIC_MODELS
    from triton_repo.repository import render
    from triton_repo.server import ServerSettings
    from triton_repo.serving_state import ServingState
    from triton_repo.watchdog import Watchdog
    from triton_repo.workplace import held

    state = ServingState(folder / "state")
    with ExitStack() as running:
        running.enter_context(held(folder))
        models = render(store, folder / "repository", replace(chosen, state=state.folder))
        settings = ServerSettings(folder / "repository", folder / "server.log", PUBLIC_MODELS, **run)
        started = time.monotonic()
        with console.steps() as progress:
            numbers = itertools.count(1)

            def loaded(name: str) -> None:
                progress(Moment(next(numbers), len(models), name, "ready"))

            logged = _print_json if log_json else (lambda line: None)
            server = running.enter_context(Watchdog(settings, state, policy, loaded, console.heading, logged))
        console.heading(f"ready after {time.monotonic() - started:.1f} s, log {settings.log_file}")
        # One that is lost meanwhile is the watchdog's business.
        with suppress(*UNREACHABLE):
            if line := _ranks(read_metrics(server.endpoints.metrics)):
                console.heading(line)
        yield server


def _ranks(metrics: str) -> str:
    """What the ranks have as weights; empty where there is one."""
    weights = [int(count) for _, count in samples(metrics, RANK_WEIGHTS.name, model=STREAM)]
    if len(weights) < 2:
        return ""
    return f"{len(weights)} ranks, weights of {amount(sum(weights))} together, at most {amount(max(weights))} in one"


def cache_bytes(text: str) -> int:
    """The bytes that --condition-cache stands for. Raises CommandError."""
    return 0 if text == "off" else bytes_of("--condition-cache", text, "off or ")


def _print_json(line: str) -> None:
    from triton_repo.server_log import as_json

    console.line(as_json(line))
