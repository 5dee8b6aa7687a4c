"""Commands of a serving host: serve, ask for clips, check the machine; and the demonstration of everything."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h3trt import console, paths
from h3trt.build_commands import ProfileOption, StoreOption
from h3trt.exits import CommandError, Exit
from h3trt.growing_files import GrowingFiles, in_fragments
from h3trt.media_options import REF_HELP, attach
from h3trt.serving import DEFAULT_CACHE, cache_bytes, running_server
from triton_repo.names import (
    DEFAULT_HANG_SECONDS,
    DEFAULT_QUEUE,
    DEFAULT_QUEUE_SECONDS,
    DEFAULT_RESTARTS,
    HIGH,
    NORMAL,
)

if TYPE_CHECKING:
    from triton_repo.client import Files, Fragments, Generated

# The demonstration's clip: 107 frames at the smallest canvas.
DEMO_PROMPT = "A red fox runs over fresh snow at dawn, its steps crunching, a raven calling far away."
DEMO_PARAMS = {"aspect_ratio": "1:1", "width": 256, "height": 256, "duration": 4, "num_inference_steps": 4, "seed": 1}

UrlOption = Annotated[str, typer.Option(help="The server's gRPC endpoint, host:port.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0 takes a free one.")]


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    for command in (serve, generate, demo, doctor):
        app.command()(command)


def serve(
    profile: ProfileOption = "cpu",
    store: StoreOption = None,
    grpc_port: PortOption = 8001,
    http_port: PortOption = 8000,
    metrics_port: PortOption = 8002,
    queue: Annotated[
        int, typer.Option(min=1, help="Requests of each priority that may wait for a model; more are refused.")
    ] = DEFAULT_QUEUE,
    queue_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which a request that still waits is refused.")
    ] = DEFAULT_QUEUE_SECONDS,
    media_host: Annotated[
        list[str] | None,
        typer.Option(help="Host that requests may name URLs of, or *.HOST for all below it; repeat it. Default: none."),
    ] = None,
    media_root: Annotated[
        Path | None, typer.Option(help="Folder that requests may name files of. Default: none.", exists=True)
    ] = None,
    condition_cache: Annotated[
        str,
        typer.Option(help="Memory for encoded prompts and references, in ranks or else each of two models; or off."),
    ] = DEFAULT_CACHE,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running requests get when stopping.")] = 600,
    warm: Annotated[
        bool | None,
        typer.Option("--warm/--no-warm", help="Run requests of each size before being ready. Default: on GPUs."),
    ] = None,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds that the models get to be ready.")] = 1800,
    metrics_host: Annotated[
        str, typer.Option(help="Address to publish metrics at, for a Prometheus on another machine.")
    ] = "127.0.0.1",
    trace: Annotated[
        str, typer.Option(help="URL of an OpenTelemetry collector, http://HOST:4318/v1/traces. Default: none.")
    ] = "",
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Write the server's log to standard output too, one JSON object a line.")
    ] = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="Times in a row that a server is started again that died or hangs.")
    ] = DEFAULT_RESTARTS,
    hang_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds without an answer or a unit of progress that count as hung; 0: never.")
    ] = DEFAULT_HANG_SECONDS,
) -> None:
    """Serve an engine store with Triton on loopback until Ctrl-C or SIGTERM.

    Stopping refuses new requests and lets the others finish; a second Ctrl-C ends them at once. A server that dies,
    loses a model's process or hangs is started again under the same ports; exit code 5 when that does not help.
    """
    from triton_repo.repository import RepositorySettings
    from triton_repo.watchdog import RestartPolicy

    ports = {"grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port}
    settings = RepositorySettings(
        max_queue_size=queue,
        queue_timeout=queue_timeout,
        media_hosts=tuple(media_host or ()),
        media_root=media_root,
        condition_cache=cache_bytes(condition_cache),
        warm=warm,
        hang=hang_timeout,
    )
    policy = RestartPolicy(attempts=restarts, hang=hang_timeout)
    run = {**ports, "ready_timeout": ready_timeout, "trace": trace, "metrics_host": metrics_host}
    place = paths.triton(profile)
    with running_server(place, store or paths.engine_store(profile), settings, run, policy, log_json) as server:
        if not log_json:
            console.line(f"gRPC    {server.endpoints.grpc}   (h3trt generate --url {server.endpoints.grpc} PROMPT)")
            console.line(f"HTTP    http://{server.endpoints.http}")
            console.line(f"metrics http://{server.endpoints.metrics}/metrics")
        try:
            server.run()
        except KeyboardInterrupt:
            console.heading("stopping: new requests are refused, running ones may finish (Ctrl-C ends them at once)")
            if not server.drain(drain_timeout):
                raise CommandError(f"requests were cut off after {drain_timeout:g} s", Exit.SERVER) from None


def generate(
    prompt: Annotated[str, typer.Argument(help="What to show and to sound, taken verbatim.")],
    seconds: Annotated[float | None, typer.Option(help="Duration, 4 to 15 s.")] = None,
    aspect_ratio: Annotated[str | None, typer.Option(help="21:9, 16:9, 4:3, 1:1, 3:4 or 9:16.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels, a multiple of 32; give both sides or neither.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels, a multiple of 32.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same clip.")] = None,
    forwards: Annotated[
        int | None, typer.Option(help="Evaluations of the denoiser, 49 or a distilled model's own unless given.")
    ] = None,
    first: Annotated[str | None, typer.Option(help="Image that is the first frame: a file or a URL.")] = None,
    last: Annotated[str | None, typer.Option(help="Image that is the last frame: a file or a URL.")] = None,
    ref: Annotated[list[str] | None, typer.Option(help=REF_HELP)] = None,
    quality: Annotated[
        str | None, typer.Option(help="Tier, such as lossless, skip or sage; which there are is the profile's choice.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="One of the server's adapters, which brings its own schedule.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds until the clip must be there; refused at once if it cannot be.")
    ] = None,
    urgent: Annotated[bool, typer.Option("--urgent", help="Leave the queue before requests that are not.")] = False,
    outputs: Annotated[int | None, typer.Option(help="Clips to make, 1 to 10; the i-th has seed + i.")] = None,
    params: Annotated[str, typer.Option(help="Further fields of the request, as a JSON object.")] = "{}",
    out: Annotated[
        Path, typer.Option(help="The MP4 file to write; of several outputs clip-0.mp4, clip-1.mp4 and so on.")
    ] = paths.OUTPUT / "clip.mp4",
    url: UrlOption = "127.0.0.1:8001",
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds after which to give up.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Run the engines here, without a server.")] = False,
    profile: ProfileOption = "cpu",
    store: StoreOption = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="A fragmented MP4, written as it is made: it plays while it grows.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved request; generate nothing.")] = False,
) -> None:
    """Turn a prompt into an MP4 with sound. Ctrl-C cancels it, on the server too."""
    given = {
        "duration": seconds,
        "aspect_ratio": aspect_ratio,
        "width": width,
        "height": height,
        "seed": seed,
        "num_inference_steps": forwards,
        "quality": quality,
        "num_outputs_per_prompt": outputs,
        "deadline": deadline,
        "lora": None if adapter is None else {"name": adapter},
    }
    media = attach(first, last, ref or [])
    request = _object(params) | media.params | {name: value for name, value in given.items() if value is not None}
    if stream:
        request = in_fragments(request)
    source = _Local(store or paths.engine_store(profile)) if local else _Remote(url, timeout, urgent)
    if dry_run:
        console.line(json.dumps(source.resolve(prompt, request, media.files), indent=2, ensure_ascii=False))
        return
    paths.check_writable(out)
    started = time.monotonic()
    files = GrowingFiles(lambda index: _path(out, index, outputs or 1))
    with files, console.stages() as progress:
        clip = source.generate(prompt, request, progress, media.files, files.add if stream else _keep)
    _save(clip, out, time.monotonic() - started, written=stream)


def demo(
    out: Annotated[Path, typer.Option(help="The MP4 file to write.")] = paths.OUTPUT / "demo.mp4",
    work: Annotated[Path, typer.Option(help="Directory for the checkpoint and the engines.")] = Path("build/demo"),
) -> None:
    """Go the whole way on this machine: miniature checkpoint, engines, Triton server, one request, checked MP4."""
    from engines.build import build
    from export.miniature import write_miniature
    from triton_repo.installation import Installation
    from triton_repo.repository import RepositorySettings

    Installation.find()
    paths.check_writable(out)
    checkpoint, store = work / "checkpoint", work / "engines"
    console.heading("1. miniature checkpoint")
    if not checkpoint.exists():
        write_miniature(checkpoint, "native", 0)
    console.heading("2. engines for profile cpu")
    with console.steps() as steps:
        build(checkpoint, "cpu", store, steps)
    console.heading("3. Triton server")
    with running_server(work / "triton", store, RepositorySettings(), {}) as server:
        console.heading("4. one gRPC request")
        started = time.monotonic()
        with console.stages() as progress:
            clip = _Remote(server.endpoints.grpc, None).generate(DEMO_PROMPT, DEMO_PARAMS, progress, {}, _keep)
        _save(clip, out, time.monotonic() - started)
    console.heading("5. check")
    _check(clip, out)


def doctor(profile: ProfileOption = "cpu", store: StoreOption = None) -> None:
    """Check this machine for building and serving; for all that is missing, print the command that mends it."""
    from engines.profile import Profile
    from h3trt.doctor import examine

    checks = examine(store or paths.engine_store(profile), Profile.load(profile))
    console.table("", ("", "what", "found"), [("ok" if c.good else "!!", c.name, c.found) for c in checks])
    bad = [check for check in checks if not check.good]
    for check in bad:
        console.error(f"{check.name}: {check.remedy or check.found}")
    if bad:
        raise typer.Exit(Exit.SERVER)


class _Remote:
    """Clips from a server."""

    def __init__(self, url: str, timeout: float | None, urgent: bool = False) -> None:
        self._url, self._timeout = url, timeout
        self._priority = HIGH if urgent else NORMAL

    def resolve(self, prompt: str, params: Mapping[str, Any], files: Files) -> Mapping[str, Any]:
        from triton_repo.client import Client

        with Client(self._url) as client:
            return client.resolve(prompt, params, self._timeout, files)

    def generate(
        self, prompt: str, params: Mapping[str, Any], progress: console.Stages, files: Files, fragments: Fragments
    ) -> Generated:
        from triton_repo.client import Client

        with Client(self._url) as client:
            return client.generate(prompt, params, progress, self._timeout, files, self._priority, fragments)


class _Local:
    """Clips made without a server: in this process, or in ranks of its own."""

    def __init__(self, store: Path) -> None:
        from runtime.ranked_pipeline import open_pipeline
        from runtime.ranks import GroupSettings, RankGroup

        def start(settings: GroupSettings) -> RankGroup:
            return RankGroup(settings, console.heading).start()

        self._pipeline = open_pipeline(store, start=start)

    def resolve(self, prompt: str, params: Mapping[str, Any], files: Files) -> Mapping[str, Any]:
        return self._pipeline.take(prompt, params, files).resolved.model_dump(mode="json")

    def generate(
        self, prompt: str, params: Mapping[str, Any], progress: console.Stages, files: Files, fragments: Fragments
    ) -> Generated:
        from runtime.events import Cancellation
        from triton_repo.client import Generated

        taken = self._pipeline.take(prompt, params, files)
        started, arrivals = time.monotonic(), list[float]()

        def note(index: int, piece: bytes) -> None:
            arrivals.append(time.monotonic() - started)
            fragments(index, piece)

        fragmented = taken.resolved.media.container == "fragmented"
        mp4s = self._pipeline.generate(
            taken,
            lambda event: progress(json.loads(event.to_json())),
            Cancellation(),
            note if fragmented else _keep,
        )
        made = tuple(mp4s)
        return Generated(made, taken.resolved.model_dump(mode="json"), arrivals[0] if arrivals else None)


def _object(text: str) -> dict[str, Any]:
    from runtime.request import parse_params

    return parse_params(text)


def _keep(index: int, piece: bytes) -> None:
    """The file is written when it is whole."""


def _path(out: Path, index: int, outputs: int) -> Path:
    """The file of one output."""
    return out if outputs == 1 else out.with_name(f"{out.stem}-{index}{out.suffix}")


def _save(clip: Generated, out: Path, seconds: float, written: bool = False) -> None:
    """Writes the files, unless they have been written as they came, and says what was made."""
    from engines.store import write_atomically

    for note in clip.resolved["notes"]:
        console.heading(f"note: {note}")
    if clip.first_fragment is not None:
        console.heading(f"first fragment after {clip.first_fragment:.1f} s")
    shape = "{width}x{height}, {frames} frames, {forwards} forwards".format(**clip.resolved)
    for index, mp4 in enumerate(clip.mp4s):
        path = _path(out, index, len(clip.mp4s))
        if not written:
            write_atomically(path, mp4)
        seed = clip.resolved["seed"] + index
        console.line(f"{path}: {shape}, seed {seed}, {len(mp4) / 1e6:.2f} MB, made in {seconds:.1f} s")


def _check(clip: Generated, out: Path) -> None:
    from runtime.probe import inspect_mp4

    resolved = clip.resolved
    problems = inspect_mp4(clip.mp4).problems(resolved["width"], resolved["height"], resolved["frames"])
    if problems:
        raise CommandError(f"{out}: " + "; ".join(problems), Exit.VERIFICATION)
    console.line(f"{out}: every frame and sample decodes, and all is as requested")
