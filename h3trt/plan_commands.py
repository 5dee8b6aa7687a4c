"""`h3trt plan`: what a profile's machine has to hold, move and compute, without that machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h3trt import console, paths

if TYPE_CHECKING:
    from engines.plan import Plan
    from engines.profile import Profile
    from export.checkpoint.outline import Outline
    from plugins.distilled import Distilled


class Student(StrEnum):
    """The released few-step models that are fused into a checkpoint, or are one."""

    FASTH3_V1 = "fasth3-v1"
    FASTH3_V1_VSA = "fasth3-v1-vsa"
    FASTH3_V2 = "fasth3-v2"

    @property
    def distilled(self) -> Distilled:
        """What requests to it are bound to."""
        from export.artifacts import fasth3, fasth3_v2
        from plugins.distilled import VideoSparse

        if self is Student.FASTH3_V2:
            return fasth3_v2.DISTILLED
        sparse = VideoSparse(sparsity=fasth3.SPARSITY) if self is Student.FASTH3_V1_VSA else None
        return fasth3.distilled(self.value, sparse)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(plan)


def plan(
    profile: Annotated[str, typer.Option(help="Hardware profile: the name of a shipped one, or a .toml file.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint, of which only config files are read; by default the release.")
    ] = None,
    student: Annotated[
        Student | None, typer.Option(help="A few-step model in the release's place; the --checkpoint of one says so.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Duration, 4 to 15 s.")] = 10,
    aspect_ratio: Annotated[
        str, typer.Option("--aspect-ratio", "--aspect", help="21:9, 16:9, 4:3, 1:1, 3:4 or 9:16.")
    ] = "16:9",
    forwards: Annotated[
        int | None, typer.Option(min=1, max=200, help="Evaluations of the denoiser; by default 49, or a student's own.")
    ] = None,
    text_rows: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    images: Annotated[int, typer.Option(min=0, help="Reference images.")] = 0,
    videos: Annotated[int, typer.Option(min=0, help="Reference videos, with sound.")] = 0,
    sounds: Annotated[int, typer.Option(min=0, help="Reference sounds.")] = 0,
    adapters: Annotated[int, typer.Option(min=0, help="Adapters that requests may choose.")] = 0,
    json: Annotated[str | None, typer.Option(help="Write JSON to this file, or to standard output for -.")] = None,
) -> None:
    """Plan a request on a hardware profile: memory by stage and rank, disk, and a lower bound of the time.

    Everything is computed from dimensions. A profile that a request does not fit is refused, with what would fit.
    """
    from engines.plan import Workload, make_plan, released_outline
    from engines.profile import Profile
    from engines.store import write_atomically
    from export.checkpoint.outline import Outline
    from h3trt.exits import CommandError
    from plugins.shape import ASPECT_RATIOS

    if aspect_ratio not in ASPECT_RATIOS:
        raise CommandError(f"aspect_ratio: got {aspect_ratio!r}; must be one of {', '.join(ASPECT_RATIOS)}")
    if json not in (None, "-"):
        paths.check_writable(Path(json))
    if checkpoint and student:
        raise CommandError("--student and --checkpoint: give one; a student's own checkpoint says which it is")
    distilled = student.distilled if student else None
    outline = Outline.read(checkpoint) if checkpoint else released_outline(distilled)
    asked = {
        "seconds": seconds,
        "aspect_ratio": aspect_ratio,
        "forwards": forwards,
        "text_rows": text_rows,
        "images": images,
        "videos": videos,
        "sounds": sounds,
        "adapters": adapters,
    }
    workload = Workload.model_validate({name: value for name, value in asked.items() if value is not None})
    loaded = Profile.load(profile)
    made = make_plan(loaded, outline, workload)
    if json is None:
        _show(made)
        _show_tiers(loaded.serving(outline.student), made.workload.forwards, outline)
    elif json == "-":
        console.line(made.to_json())
    else:
        write_atomically(Path(json), made.to_json().encode())


def _show(plan: Plan) -> None:
    rows, work = plan.rows, plan.workload
    console.line(
        f"profile {plan.profile}: {work.seconds:g} s of {work.aspect_ratio} is {plan.frames} frames of "
        f"{plan.width}x{plan.height}, {rows.total:,} rows ({rows.local:,} a rank), {plan.tiles} decoder tiles, "
        f"{work.forwards} forwards"
    )
    _show_graphs(plan)
    _show_stages(plan)
    limit = f" of {plan.limit / 1e9:.2f} GB" if plan.limit else ""
    console.line(
        f"peak {plan.peak / 1e9:.2f} GB{limit}; host memory {plan.host / 1e9:.1f} GB ({plan.pinned / 1e9:.1f}"
        f" pinned); disk {plan.disk / 1e9:.1f} GB ({plan.checkpoint / 1e9:.1f} checkpoint)"
    )
    if rows.chunk < rows.local:
        chunks = -(-rows.local // rows.chunk)
        console.line(
            f"row-local parts of a block, the feed-forward too: {chunks} chunks of at most {rows.chunk:,} rows"
        )
    if plan.student:
        console.line(
            f"{plan.student} pins its schedule: {plan.folded / 1e9:.2f} GB of its transformer are read by the build "
            f"alone, which makes {plan.tables / 1e9:.2f} GB of tables of them"
        )
    if work.adapters:
        console.line(f"adapters: {work.adapters}, of {plan.adapter / 1e9:.2f} GB of weights each")
    if plan.seconds:
        console.line(f"at least {plan.seconds:.1f} s: what the device's rated figures allow, no measurement")


def _show_tiers(profile: Profile, forwards: int, outline: Outline) -> None:
    """What a request may choose, where there is a choice."""
    from h3trt.profile_page import tier_rows

    if profile.quality:
        head = ("quality", "linears", f"attention in {forwards} forwards", "engine")
        positions = outline.student.schedule.positions if outline.student else None
        tiers = tier_rows(profile, forwards, outline.dimensions.video_shift, positions)
        cells = [tuple(cell.replace("`", "") for cell in row[1:]) for row in tiers]
        console.table("tiers of quality, which share all weights", head, cells)


def _show_graphs(plan: Plan) -> None:
    head = ("graph", "instances", "runs", "weights", "activations", "io", "attention", "collectives", "operations")
    cells = [
        (
            graph.graph,
            str(graph.instances),
            str(graph.runs),
            *map(_size, (graph.weights, graph.activations + graph.workspace, graph.io, graph.attention)),
            _size(graph.collectives),
            ", ".join(f"{count / 1e12:.3g} T {name}" for name, count in graph.flops.items()),
        )
        for graph in plan.graphs
        if graph.runs
    ]
    console.table("graphs, GB on one GPU", head, cells)


def _show_stages(plan: Plan) -> None:
    head = (
        "stage",
        "weights",
        "moved in",
        "activations",
        "buffers",
        "collectives",
        "process",
        "peak",
        "at least",
        "bound by",
    )
    cells = [
        (
            stage.name,
            *map(_size, (stage.weights, stage.slots, stage.activations + stage.workspace, stage.buffers)),
            *map(_size, (stage.collectives, stage.process)),
            " ".join(dict.fromkeys(_size(peak) for peak in stage.peaks)),
            *((f"{stage.seconds:.2f} s", stage.bound) if stage.seconds else ("", "")),
        )
        for stage in plan.stages
        if stage.flops
    ]
    console.table("stages, GB on the fullest GPU", head, cells)


def _size(count: float) -> str:
    return f"{count / 1e9:.2f}" if count else "-"
