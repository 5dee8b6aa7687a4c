"""`h3trt perf`: latency and throughput of a server, as an unmodified load generator sees them."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h3trt import console, paths
from h3trt.build_commands import ProfileOption, StoreOption
from h3trt.exits import CommandError, Exit
from h3trt.serving import running_server

if TYPE_CHECKING:
    from bench.perf.clips import Make
    from bench.perf.point import Point
    from bench.perf.workload import Workload
    from engines.store import Manifest


class LoadClient(StrEnum):
    """Who makes the requests."""

    PERF_ANALYZER = "perf_analyzer"
    AIPERF = "aiperf"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(perf)


def perf(
    profile: ProfileOption = "cpu",
    client: Annotated[
        LoadClient, typer.Option(help="perf_analyzer calls the ensemble over gRPC, aiperf the gateway over HTTP.")
    ] = LoadClient.PERF_ANALYZER,
    url: Annotated[
        str | None,
        typer.Option(help="A running server's gRPC endpoint or gateway. Default: one is started for the measurement."),
    ] = None,
    store: StoreOption = None,
    workload: Annotated[
        Path | None, typer.Option(help="File of what to ask for. Default: the profile's, in bench/perf/workloads.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the JSON, CSV, table and plot.")] = Path("bench/results"),
    work: Annotated[Path, typer.Option(help="Folder of the load generator and all that it writes.")] = paths.PERF,
    fetch: Annotated[bool, typer.Option("--fetch", help="Get the load generator here; measure nothing.")] = False,
) -> None:
    """Measure a server under load: concurrency 1 to 4, each duration twice, in windows of a number of requests.

    Writes the figures, a table and a plot of latency by throughput; what did not settle is marked in both. Every
    duration is made and checked once before. perf_analyzer 2.60 or aiperf 0.13 is installed below the work folder.
    """
    from bench.perf import summary
    from bench.perf.workload import Workload
    from engines.profile import Profile
    from engines.store import EngineStore

    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("the plot needs matplotlib; run: pip install 'h3trt[plot]'")
    generator = _Generator.get(client, work)
    console.heading(f"{client.value}: {generator.origin}")
    if fetch:
        return
    load = Workload.load(Profile.load(profile), workload)
    opened = EngineStore.open(store or paths.engine_store(profile))
    with ExitStack() as running:
        target = url or running.enter_context(_target(client, profile, opened.root, work))
        points = generator.measure(load, target, opened.tokenizer_file, work / "sweeps" / Path(profile).stem)
    measured = _measured(generator, profile, load, opened.manifest, points, url)
    suffix = "" if client is LoadClient.PERF_ANALYZER else f"_{client.value}"
    for file in summary.write(measured, out, f"perf_{Path(profile).stem}{suffix}"):
        console.line(f"{file}")
    console.line(summary.table(measured))


class _Generator:
    """A load generator that is installed. origin: where it is from."""

    def __init__(self, client: LoadClient, origin: str, program: Any) -> None:
        self.client, self.origin, self._program = client, origin, program

    @classmethod
    def get(cls, client: LoadClient, folder: Path) -> _Generator:
        """Finds it or installs it below `folder`. Raises InstallError."""
        from bench.perf import aiperf, install

        if client is LoadClient.AIPERF:
            return cls(client, f"release {aiperf.VERSION}", aiperf.aiperf(folder))
        found = install.perf_analyzer(folder)
        return cls(client, f"{found.origin}, commit {found.commit}", found)

    def measure(self, load: Workload, url: str, tokenizer: Path, folder: Path) -> list[Point]:
        """All points of the workload, in the order in which they were measured, after a clip of each duration."""
        from bench.perf.analyzer import Load
        from bench.perf.clips import warm

        clips = warm(load, self._make(url), console.heading)
        first, last = load.concurrency
        points: list[Point] = []
        for seconds, visit in load.order:
            console.heading(f"visit {visit} of {load.visits}: {seconds} s, concurrency {first} to {last}")
            one = Load(
                prompt=load.prompt,
                params=load.params(seconds),
                seconds=seconds,
                visit=visit,
                clip=clips[seconds].clip,
                concurrencies=load.concurrencies,
                requests=load.requests,
            )
            points += self._run(url, one, tokenizer, folder / self.client.value / f"{seconds}s-visit{visit}")
        return points

    def _make(self, url: str) -> Make:
        from bench.perf.clips import over_grpc, over_http

        return over_http(url) if self.client is LoadClient.AIPERF else over_grpc(url)

    def _run(self, url: str, load: Any, tokenizer: Path, folder: Path) -> tuple[Point, ...]:
        from bench.perf import aiperf, analyzer

        if self.client is LoadClient.AIPERF:
            return aiperf.run(self._program, url, load, aiperf.write_tokenizer(tokenizer, folder / "tokenizer"), folder)
        return analyzer.run(self._program, url, load, folder)


@contextmanager
def _target(client: LoadClient, profile: str, store: Path, work: Path) -> Iterator[str]:
    """A server that keeps no conditions, so that every request encodes; for aiperf with a gateway in front of it."""
    from triton_repo.repository import RepositorySettings

    with ExitStack() as running:
        settings = RepositorySettings(condition_cache=0)
        server = running.enter_context(running_server(paths.triton(profile), store, settings, {}))
        grpc = server.endpoints.grpc
        yield running.enter_context(_gateway(grpc, work / "gateway")) if client is LoadClient.AIPERF else grpc


@contextmanager
def _gateway(triton: str, folder: Path) -> Iterator[str]:
    """A gateway in a process of its own, on a free port; its URL."""
    program = (sys.executable, "-c", "from h3trt.cli import main; main()")
    options = ("gateway", "--triton", triton, "--port", "0", "--folder", str(folder))
    process = subprocess.Popen([*program, *options], stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        if said[:1] != ["gateway"]:
            raise CommandError("the gateway did not start; what it says is above", Exit.SERVER)
        yield said[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _measured(
    generator: _Generator, profile: str, load: Workload, manifest: Manifest, points: list[Point], url: str | None
) -> dict[str, Any]:
    """The whole result, with what it was taken on."""
    from bench import machine

    size = manifest.dimensions.denoiser
    return {
        "what": f"clips of {', '.join(map(str, load.seconds))} s in {load.forwards} forwards, under load",
        "excludes": "start, loading, and a first request of each duration",
        "client": f"{generator.client.value} ({generator.origin})",
        "profile": Path(profile).stem,
        "server": "started for this" if url is None else "another's; the store is this machine's",
        "condition_cache": "off" if url is None else "as that server has it",
        "machine": machine.describe(),
        "commit": machine.commit(),
        "model": {
            "fingerprint": manifest.checkpoint.fingerprint,
            "denoiser": {"layers": size.layers, "hidden": size.hidden},
        },
        "versions": dict(manifest.versions),
        "workload": load.model_dump(),
        "prompt_sha256": load.prompt_sha256,
        "points": [point.as_json(load.gates) for point in points],
    }
