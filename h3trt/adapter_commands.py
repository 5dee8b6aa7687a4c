"""`h3trt adapters`: what a few-step artifact is, whether it fits a checkpoint, and the student that it makes of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h3trt import console, paths
from h3trt.amounts import amount
from h3trt.console import Moment
from h3trt.exits import CommandError, Exit

if TYPE_CHECKING:
    from export.artifacts.summary import Summary
    from plugins.distilled import Distilled

ArtifactArgument = Annotated[
    Path, typer.Argument(help="An adapter's .safetensors file, a folder with one, or the folder of a whole student.")
]


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    adapters = typer.Typer(help="Few-step adapters and students.", no_args_is_help=True)
    adapters.command("inspect")(inspect)
    adapters.command("fuse")(fuse)
    app.add_typer(adapters, name="adapters")


def inspect(
    path: ArtifactArgument,
    checkpoint: Annotated[
        Path | None, typer.Option(help="See whether it fits this checkpoint; by default, the released model's sizes.")
    ] = None,
    sha256: Annotated[str | None, typer.Option(help="What the file's SHA-256 must be, in hexadecimal.")] = None,
    json: Annotated[str | None, typer.Option(help="Write JSON to this file, or to standard output for -.")] = None,
) -> None:
    """Say what a few-step artifact is, what it changes, and what requests are bound to.

    Its file is read through: one that holds numbers which are not finite is refused, like one that is incomplete.
    """
    from engines.store import write_atomically
    from export.artifacts import open_artifact
    from export.artifacts.summary import summarise
    from export.checkpoint import Checkpoint, CheckpointError

    if json not in (None, "-"):
        paths.check_writable(Path(json))
    base = None if checkpoint is None else Checkpoint.open(checkpoint)
    try:
        artifact = open_artifact(path, base, sha256)
    except CheckpointError as error:
        if base is not None:
            raise
        hint = "compared with the released model; --checkpoint DIRECTORY names another"
        raise CommandError(f"{error} ({hint})", Exit.CHECKPOINT) from error
    summary = summarise(artifact)
    if json is None:
        _show(summary, artifact.distilled, checkpoint)
    elif json == "-":
        console.line(summary.to_json())
    else:
        write_atomically(Path(json), summary.to_json().encode())


def fuse(
    path: ArtifactArgument,
    checkpoint: Annotated[Path, typer.Option(help="The base checkpoint, which stays where it is.")],
    out: Annotated[Path, typer.Option(help="The student's directory, new or empty.")],
    sha256: Annotated[str | None, typer.Option(help="What the file's SHA-256 must be, in hexadecimal.")] = None,
) -> None:
    """Make a student of a checkpoint and a FastH3 artifact: a checkpoint for `h3trt engines build` and all else.

    What the artifact changes is written once; the student reads everything else from the base, so keep both. A whole
    student is not copied: its directory is read as well.
    """
    from export.artifacts import open_artifact
    from export.artifacts.fuse import fuse as make
    from export.checkpoint import Checkpoint

    base = Checkpoint.open(checkpoint)
    artifact = open_artifact(path, base, sha256)
    with console.steps() as progress:
        try:
            made = make(artifact, base, out, lambda key, written, size: progress(Moment(written, size, key, "working")))
        except FileExistsError as error:
            raise CommandError(str(error)) from None
    assert made.student is not None
    own = amount(sum(file.stat().st_size for file in out.iterdir()))
    console.line(f"{out}: {made.student.name}, {own} beside {checkpoint}; {made.student.schedule.forwards} forwards")


def _show(summary: Summary, distilled: Distilled, checkpoint: Path | None) -> None:
    schedule, sparse = distilled.schedule, distilled.video_sparse
    uses = {
        "fused": "is fused into the checkpoint for good: h3trt adapters fuse",
        "whole": "takes the place of the transformer: h3trt adapters fuse",
        "switchable": "can be chosen by requests: h3trt engines build --adapter",
    }
    console.line(f"{distilled.name}, of family {distilled.family}: {uses[summary.application]}")
    console.line(f"tasks {', '.join(distilled.tasks)}, partition {summary.partition}; {amount(summary.nbytes)}")
    positions = "equally spaced" if schedule.positions is None else ", ".join(f"{one:g}" for one in schedule.positions)
    console.line(
        f"{schedule.forwards} forwards, positions {positions}; shifts {schedule.video_shift:g} of video, "
        f"{schedule.audio_shift:g} of sound"
    )
    if sparse is not None:
        console.line(f"sparse attention of video: tiles of {sparse.tile} rows, sparsity {sparse.sparsity:g}")
    if distilled.sha256 is not None:
        console.line(f"sha256 {distilled.sha256}")
    console.line(f"fits {checkpoint or 'the sizes of the released model'}")
    rows = [(touched.parameters, f"{touched.count:,}", touched.change) for touched in summary.touched]
    console.table("changes", ("parameters", "count", "change"), rows)
