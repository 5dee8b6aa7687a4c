"""`h3trt bench`: measurements on this machine's GPU, beside peers where there are any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h3trt import console

if TYPE_CHECKING:
    from engines.profile import Profile


DEFAULT_PROFILE = "h200_inductor"
"""The profile whose results have its subject's name alone."""


class Subject(StrEnum):
    """What can be measured."""

    ATTENTION = "attention"
    VSA = "vsa"
    GEMM = "gemm"
    ROWS = "rows"
    BLOCK = "block"
    ADAPTERS = "adapters"
    DENOISER = "denoiser"
    VAE = "vae"
    END_TO_END = "end-to-end"
    QUALITY = "quality"
    TAIL = "tail"
    PACKAGES = "packages"
    EXCHANGE = "exchange"
    SHARDED = "sharded"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(bench)


def bench(
    subject: Annotated[Subject, typer.Argument(help="What to measure.")],
    profile: Annotated[str, typer.Option(help="Hardware profile with backend inductor.")] = DEFAULT_PROFILE,
    rows: Annotated[int, typer.Option(min=1, help="Rows of attention, gemm, rows, block and adapters.")] = 58_880,
    forwards: Annotated[int, typer.Option(min=2, help="Forwards of denoiser, end-to-end and quality.")] = 4,
    store: Annotated[
        Path | None,
        typer.Option(help="Of quality and adapters: an engine store, on any back end, instead of random weights."),
    ] = None,
    duration: Annotated[float, typer.Option(min=4, max=15, help="Seconds of quality's clips.")] = 5,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT of quality's clips; by default 1344x768.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Clips of each tier in quality.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the JSON, the table and the plot.")] = Path("bench/results"),
    work: Annotated[Path, typer.Option(help="Folder that compiled engines are kept in.")] = Path("build/bench"),
) -> None:
    """Measure on this machine's GPU, at released dimensions, with random weights and data.

    attention: kernels, their errors, and what skipping saves. vsa: attention to video tiles alone.
    gemm: the block's products. rows: the work between them.
    tail: decoding and encoding one after the other and side by side, on a GPU or with the profile cpu.
    block: one transformer block beside diffusers'. adapters: blocks with an adapter in either mode beside the base's,
    and what changing adapters between requests costs; of a store, with those that it offers. denoiser: whole forwards,
    and memory beside the plan. vae: the tiles of a clip and its MP4. end-to-end: a request, by stages. quality: clips
    of every tier of a profile, or of a store on any machine, beside lossless ones. packages: no measurement, but all
    that the others compile, side by side. exchange: rows for heads between two GPUs, over NCCL and by writes.
    sharded: two blocks whose rows two GPUs share, beside one GPU.
    """
    if subject is Subject.QUALITY:
        clips = {"aspect_ratio": "16:9", "duration": duration, "num_inference_steps": forwards}
        _quality(store, profile, work, clips | ({"size": size} if size else {}), seeds, out)
        return
    if subject is Subject.ADAPTERS and store:
        from bench import adapters

        measured = adapters.measure_store(store)
        _write(measured, out, f"adapters.{Path(measured['profile']).stem}")
        return
    if subject in (Subject.EXCHANGE, Subject.SHARDED):
        _two_gpus(subject, _made(work), out)
        return
    if subject is Subject.TAIL:
        _tail(profile, _made(work / "tail"), out)
        return
    # What is measured is the first tier; engines of others would only take time to compile.
    loaded = _on_this_gpu(profile).model_copy(update={"quality": {}})
    measured = _measure(subject, loaded, _made(work), rows, forwards)()
    name = subject.replace("-", "_") if profile == DEFAULT_PROFILE else f"{subject.replace('-', '_')}.{profile}"
    _write(measured, out, name)


def _write(measured: Mapping[str, Any], out: Path, name: str) -> None:
    from bench import report

    for file in report.write(measured, out, name):
        console.line(f"{file}")
    console.line(report.table(measured))


def _two_gpus(subject: Subject, work: Path, out: Path) -> None:
    import torch

    from bench import exchange, sharded
    from h3trt.exits import CommandError

    if torch.cuda.device_count() < exchange.RANKS:
        found = torch.cuda.device_count()
        raise CommandError(
            f"torch finds {found} GPUs to measure on, and {exchange.RANKS} are needed; run: h3trt doctor"
        )
    measured = exchange.measure(work) if subject is Subject.EXCHANGE else sharded.measure(work)
    _write(measured, out, subject)


def _tail(profile: str, work: Path, out: Path) -> None:
    from bench import tail
    from engines.profile import Profile

    loaded = Profile.load(profile)
    measured = tail.measure(work, _on_this_gpu(profile) if loaded.on_gpu else loaded)
    for file in tail.write(measured, out, f"tail.{loaded.name}" if loaded.on_gpu else "tail"):
        console.line(f"{file}")
    console.line(tail.table(measured))


def _on_this_gpu(profile: str) -> Profile:
    import torch

    from engines.profile import Profile
    from h3trt.exits import CommandError

    loaded = Profile.load(profile)
    if loaded.backend != "inductor" or not loaded.on_gpu:
        raise CommandError(f"profile {profile}: backend = {loaded.backend!r}: must be 'inductor' with a device")
    if not torch.cuda.is_available():
        raise CommandError("torch finds no GPU to measure on; run: h3trt doctor")
    return loaded


def _made(work: Path) -> Path:
    work.mkdir(parents=True, exist_ok=True)
    return work.absolute()


def _quality(store: Path | None, profile: str, work: Path, params: Mapping[str, object], seeds: int, out: Path) -> None:
    from bench import quality
    from runtime.pipeline import Pipeline

    pipeline = Pipeline.open(store) if store else quality.synthetic(_on_this_gpu(profile), _made(work))
    measured = quality.measure(pipeline, params, range(1, seeds + 1))
    for file in quality.write(measured, out):
        console.line(f"{file}")
    console.line(quality.table(measured))


def _measure(subject: Subject, profile: Profile, work: Path, rows: int, forwards: int) -> Callable[[], dict[str, Any]]:
    """What is to be measured, ready to be called."""
    from bench import adapters, attention, block, denoiser, end_to_end, gemm, packages, vae, vsa
    from bench import rows as row_work
    from engines.plan import released_outline

    size = released_outline().dimensions.denoiser
    return {
        Subject.ATTENTION: lambda: attention.measure(rows),
        Subject.VSA: vsa.measure,
        Subject.GEMM: lambda: gemm.measure(size, rows),
        Subject.ROWS: lambda: row_work.measure(size, rows),
        Subject.BLOCK: lambda: block.measure(work, rows),
        Subject.ADAPTERS: lambda: adapters.measure(work, profile, rows),
        Subject.DENOISER: lambda: denoiser.measure(work, profile, forwards),
        Subject.VAE: lambda: vae.measure(work, profile),
        Subject.PACKAGES: lambda: packages.measure(work, profile),
        Subject.END_TO_END: lambda: end_to_end.measure(work, profile, forwards=forwards),
    }[subject]
