"""`h3trt bench`: measurements on this machine's GPU, beside peers where there are any."""

from __future__ import annotations

from collections.abc import Callable
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
    GEMM = "gemm"
    ROWS = "rows"
    BLOCK = "block"
    DENOISER = "denoiser"
    VAE = "vae"
    END_TO_END = "end-to-end"
    PACKAGES = "packages"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(bench)


def bench(
    subject: Annotated[Subject, typer.Argument(help="What to measure.")],
    profile: Annotated[str, typer.Option(help="Hardware profile with backend inductor.")] = DEFAULT_PROFILE,
    rows: Annotated[int, typer.Option(min=1, help="Rows of attention, gemm, rows and block.")] = 58_880,
    forwards: Annotated[int, typer.Option(min=2, help="Forwards of denoiser and end-to-end.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder of the JSON, the table and the plot.")] = Path("bench/results"),
    work: Annotated[Path, typer.Option(help="Folder that compiled engines are kept in.")] = Path("build/bench"),
) -> None:
    """Measure on this machine's GPU, at released dimensions, with random weights and data.

    attention: kernels, their errors, and what skipping saves. gemm: the block's products. rows: the work between them.
    block: one transformer block beside diffusers'. denoiser: whole forwards, and memory beside the plan. vae: the tiles
    of a clip and its MP4. end-to-end: a request, by stages. packages: no measurement, but all that the others compile,
    side by side.
    """
    import torch

    from bench import report
    from engines.profile import Profile
    from h3trt.exits import CommandError

    loaded = Profile.load(profile)
    if loaded.backend != "inductor" or not loaded.on_gpu:
        raise CommandError(f"profile {profile}: backend = {loaded.backend!r}: must be 'inductor' with a device")
    if not torch.cuda.is_available():
        raise CommandError("torch finds no GPU to measure on; run: h3trt doctor")
    work.mkdir(parents=True, exist_ok=True)
    measured = _measure(subject, loaded, work.absolute(), rows, forwards)()
    name = subject.replace("-", "_") if profile == DEFAULT_PROFILE else f"{subject.replace('-', '_')}.{profile}"
    for file in report.write(measured, out, name):
        console.line(f"{file}")
    console.line(report.table(measured))


def _measure(subject: Subject, profile: Profile, work: Path, rows: int, forwards: int) -> Callable[[], dict[str, Any]]:
    """What is to be measured, ready to be called."""
    from bench import attention, block, denoiser, end_to_end, gemm, packages, vae
    from bench import rows as row_work
    from engines.plan import released_outline

    size = released_outline().dimensions.denoiser
    return {
        Subject.ATTENTION: lambda: attention.measure(rows),
        Subject.GEMM: lambda: gemm.measure(size, rows),
        Subject.ROWS: lambda: row_work.measure(size, rows),
        Subject.BLOCK: lambda: block.measure(work, rows),
        Subject.DENOISER: lambda: denoiser.measure(work, profile, forwards),
        Subject.VAE: lambda: vae.measure(work, profile),
        Subject.PACKAGES: lambda: packages.measure(work, profile),
        Subject.END_TO_END: lambda: end_to_end.measure(work, profile, forwards=forwards),
    }[subject]
