"""Commands of a build host: make and look at checkpoints, export graphs, build engines, render the repository."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h3trt import console, paths
from h3trt.amounts import amount
from h3trt.console import Moment
from h3trt.exits import CommandError, Exit

if TYPE_CHECKING:
    from engines.build import BuildReport
    from engines.store import EngineRecord, Manifest
    from export.artifacts.artifact import Artifact
    from export.checkpoint import Checkpoint
    from plugins.distilled import Distilled

# What the commands call is imported inside them: `h3trt --help` answers at once, and a serving host has no exporter.


class Layout(StrEnum):
    """The file trees in which the checkpoint is published."""

    NATIVE = "native"
    DIFFUSERS = "diffusers"


class Partition(StrEnum):
    """The two transformers of the release."""

    FL2VA = "fl2va"
    REF2VA = "ref2va"


class Compute(StrEnum):
    """Element types that graphs compute in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


ProfileOption = Annotated[str, typer.Option(help="Hardware profile: the name of a shipped one, or a .toml file.")]
CheckpointOption = Annotated[Path, typer.Option(help="Checkpoint directory, in the native or the diffusers layout.")]
StoreOption = Annotated[Path | None, typer.Option(help="Engine store; by default build/engines/PROFILE.")]


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    checkpoint = typer.Typer(help="Make checkpoints for trials.", no_args_is_help=True)
    checkpoint.command("tiny")(tiny)
    app.add_typer(checkpoint, name="checkpoint")
    engines = typer.Typer(help="Build the engines of a checkpoint.", no_args_is_help=True)
    engines.command("build")(build_engines)
    app.add_typer(engines, name="engines")
    for command in (export, repo, verify, inspect):
        app.command()(command)


def tiny(
    directory: Annotated[Path, typer.Argument(help="A new or empty directory.")],
    layout: Annotated[Layout, typer.Option(help="File tree to write.")] = Layout.NATIVE,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    released_dims: Annotated[
        bool, typer.Option("--released-dims", help="The release's sizes; needs --sparse.")
    ] = False,
    sparse: Annotated[bool, typer.Option("--sparse", help="Files without data, which read as zeros.")] = False,
    with_artifacts: Annotated[
        bool, typer.Option("--with-artifacts", help="Few-step artifacts of every family too, in artifacts/.")
    ] = False,
) -> None:
    """Write a miniature checkpoint: the release's files, names and classes with small dimensions.

    With --released-dims --sparse the release's own dimensions, in files that take no room on the disk: enough to try
    the whole export without 270 GB.
    """
    from export.miniature import write_miniature, write_sparse_released

    if released_dims != sparse:
        raise CommandError("--released-dims and --sparse go together: the release's data would take 270 GB")
    try:
        if sparse:
            write_sparse_released(directory, layout.value, with_artifacts)
        else:
            write_miniature(directory, layout.value, seed, with_artifacts)
    except FileExistsError as error:
        raise CommandError(str(error)) from None
    console.line(f"{directory}: {amount(_bytes_on_disk(directory))} on disk, {layout} layout")


def export(
    checkpoint: CheckpointOption = paths.CHECKPOINT,
    out: Annotated[Path, typer.Option(help="Directory for the ONNX files.")] = Path("build/onnx"),
    partition: Annotated[Partition, typer.Option(help="The transformer to export.")] = Partition.FL2VA,
    compute: Annotated[Compute, typer.Option(help="Element type of the computation.")] = Compute.FLOAT32,
    compared: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Run each graph and its torch module; reads the weights.")
    ] = True,
) -> None:
    """Write every graph as ONNX, its weights as inputs, after comparing it with torch on the checkpoint's bytes."""
    import torch

    from export.checkpoint import Checkpoint
    from export.compare import compare
    from export.emit import emit
    from export.graphs.model import Compute as Dtypes
    from export.graphs.model import check_consumption, model_graphs

    opened = Checkpoint.open(checkpoint)
    graphs = model_graphs(opened, partition.value, Dtypes.uniform(getattr(torch, compute.value)))
    check_consumption(opened, graphs, partition.value)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    with console.steps() as progress:
        for index, graph in enumerate(graphs, start=1):
            progress(console.Moment(index, len(graphs), graph.name, "started"))
            emitted = emit(graph)
            worst = f"{compare(emitted).worst:.1e}" if compared else "not run"
            (out / f"{graph.name}.onnx").write_bytes(emitted.model.SerializeToString())
            operations = str(sum(emitted.census.values()))
            rows.append((graph.name, str(len(graph.weights)), operations, worst, f"{graph.tolerance:.1e}"))
            progress(console.Moment(index, len(graphs), graph.name, "written"))
    console.table(f"graphs in {out}", ("graph", "instances", "operations", "difference", "tolerance"), rows)


def build_engines(
    profile: ProfileOption = "cpu",
    checkpoint: Annotated[
        Path | None,
        typer.Option(help=f"Checkpoint directory; by default {paths.CHECKPOINT}, or the one that is resumed with."),
    ] = None,
    store: StoreOption = None,
    step: Annotated[str | None, typer.Option(help="Do this one step again, as a build's log suggests.")] = None,
    adapter: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of an adapter that requests may choose; once for each. By default none, or those that are "
            "resumed with."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a store that was begun on another machine.")
    ] = False,
) -> None:
    """Build the engines of a checkpoint for a hardware profile. What has not changed is left as it is.

    Where this machine lacks what the profile's engines need (TensorRT, the GPU), everything else is done, the rest is
    listed, and the exit code is 7: take the store to a machine that has it and go on there with --resume.
    """
    from engines.build import build
    from engines.store import Begun

    directory = store or paths.engine_store(profile)
    begun = Begun.read(directory) if resume else None
    source = checkpoint or (Path(begun.checkpoint) if begun else paths.CHECKPOINT)
    files = adapter or (list(map(Path, begun.adapters)) if begun else [])
    with console.steps() as progress:
        report = build(source, profile, directory, progress, step, resume, _adapters(files, source))
    counts = Counter(step.status for step in report.steps)
    if report.deferred:
        _list_deferred(report, profile)
    elif not report.built:
        console.line(f"{report.store}: nothing to do, all {len(report.steps)} steps are up to date")
    else:
        console.line(f"{report.store}: {counts['built']} steps done, {counts['reused']} up to date")


def _adapters(files: Sequence[Path], checkpoint: Path) -> list[Artifact]:
    """The adapters of some files, which must fit the checkpoint."""
    from export.artifacts.artifact import Artifact as Adapter
    from export.artifacts.read import open_artifact
    from export.checkpoint import Checkpoint

    base = Checkpoint.open(checkpoint) if files else None
    found = []
    for file in files:
        artifact = open_artifact(file, base)
        if not isinstance(artifact, Adapter):
            rule = "is a whole student, not an adapter; make a checkpoint of it with: h3trt adapters fuse"
            raise CommandError(f"{file}: {rule}", Exit.CHECKPOINT)
        found.append(artifact)
    return found


def _list_deferred(report: BuildReport, profile: str) -> None:
    """Says what remains, why, and how it is done; the store cannot be served from until then."""
    by_reason: dict[str, list[str]] = {}
    for step in report.deferred:
        by_reason.setdefault(step.facts["deferred"], []).append(step.name)
    for reason, names in by_reason.items():
        console.line(f"put off: {', '.join(names)}\n  {reason}")
    command = shlex.join(["h3trt", "engines", "build", "--profile", profile, "--store", str(report.store), "--resume"])
    raise CommandError(
        f"{report.store}: {len(report.steps) - len(report.deferred)} of {len(report.steps)} steps are done; to finish, "
        f"take it to a machine that has what is missing here, with the checkpoint (--checkpoint DIRECTORY if it lies "
        f"elsewhere there), and run: {command}",
        Exit.INCOMPLETE,
    )


def repo(
    profile: ProfileOption = "cpu",
    store: StoreOption = None,
    out: Annotated[Path | None, typer.Option(help="Directory; by default build/triton/PROFILE/repository.")] = None,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait for a model; more are refused.")] = 8,
) -> None:
    """Render the Triton model repository of an engine store, for `h3trt serve` or a tritonserver of your own."""
    from triton_repo.repository import RepositorySettings, render

    directory = out or paths.triton(profile) / "repository"
    models = render(store or paths.engine_store(profile), directory, RepositorySettings(queue))
    console.line(f"{directory}: {', '.join(model.name for model in models)}")


def verify(
    profile: ProfileOption = "cpu",
    store: StoreOption = None,
    forwards: Annotated[int, typer.Option(min=1, max=200, help="Denoiser evaluations of the compared clip.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the compared clip.")] = 42,
    out: Annotated[Path, typer.Option(help="The JSON report to write.")] = paths.OUTPUT / "verify.json",
) -> None:
    """Compare the engines with torch and the whole pipeline with diffusers, on the engines' own checkpoint.

    Takes a clip of 5 s at 256x256, the smallest that diffusers generates, of each task that the engines serve. Ends
    with exit code 6 if a number is over its limit.
    """
    from engines.store import write_atomically
    from h3trt.verify import verify as run

    paths.check_writable(out)
    with console.steps() as progress:
        numbers = itertools.count(1)
        report = run(
            store or paths.engine_store(profile),
            forwards,
            seed,
            lambda check: progress(Moment(next(numbers), None, check.title, "ok" if check.passed else "over")),
        )
    write_atomically(out, report.to_json().encode())
    rows = [(c.group, c.name, f"{c.measured:.3g}", c.rule, "ok" if c.passed else "OVER") for c in report.checks]
    console.table("verification", ("", "quantity", "measured", "limit", ""), rows)
    console.line(f"{out}: {len(report.failed)} of {len(report.checks)} checks over their limit")
    if report.failed:
        names = ", ".join(check.title for check in report.failed)
        raise CommandError(f"over the limit: {names}", Exit.VERIFICATION)


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint, an engine store, a .plan or .layers.json file of one, or an MP4 file.")
    ],
    verify_hashes: Annotated[
        bool, typer.Option("--verify-hashes", help="Hash every file of a checkpoint that its SHA256SUMS lists.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Of a plan: draw its memory by kind of layer into this file.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Of a plan: the size that each dynamic dimension counts as.")
    ] = None,
) -> None:
    """Say what a checkpoint, an engine store, a TensorRT plan or an MP4 file holds."""
    from engines.store import BEGUN, MANIFEST, rebuild_advice

    is_plan = path.suffix in (".plan", ".json")
    if not is_plan and (svg is not None or rows is not None):
        raise CommandError(f"{path}: is not a plan or a file of layers, which --svg and --rows need")
    is_checkpoint = path.is_dir() and not (path / MANIFEST).is_file()
    if verify_hashes and not is_checkpoint:
        raise CommandError(f"{path}: is not a checkpoint's directory, which --verify-hashes needs")
    if is_plan:
        _inspect_plan(path, svg, rows)
    elif path.suffix == ".safetensors":
        raise CommandError(f"{path}: name a checkpoint's directory; of an adapter: h3trt adapters inspect {path}")
    elif path.is_file():
        _inspect_clip(path)
    elif (path / MANIFEST).is_file():
        _inspect_store(path)
    elif (path / BEGUN).is_file():
        raise CommandError(f"{path}: {rebuild_advice(path)}", Exit.ENGINES)
    elif is_checkpoint:
        _inspect_checkpoint(path, verify_hashes)
    else:
        raise CommandError(f"{path}: no such file or directory")


def _difference(engine: EngineRecord) -> str:
    return "no data" if engine.difference is None else f"{engine.difference:.1e}"


def _inspect_clip(path: Path) -> None:
    from runtime.probe import ProbeError, inspect_mp4

    try:
        console.line(inspect_mp4(path).to_json())
    except ProbeError as error:
        raise CommandError(f"{path}: {error}", Exit.VERIFICATION) from error


def _inspect_plan(path: Path, svg: Path | None, rows: int | None) -> None:
    from h3trt.plan_view import PlanView

    if svg is not None:
        paths.check_writable(svg)
    view = PlanView.open(path, rows)
    for fact in view.facts:
        console.line(fact)
    counted = f"bytes at {view.rows:,} for each dynamic size"
    console.table("layers", ("layer", "kind", "precision", counted), view.rows_of_layers())
    console.table("biggest tensors", ("tensor", "type", "shape", counted), view.biggest_tensors())
    console.table("totals", ("kind", "layers", counted, "share"), view.totals())
    if svg is not None:
        view.draw(svg, path.name)


def _inspect_store(path: Path) -> None:
    from engines.store import EngineStore

    manifest = EngineStore.open(path, to_run=False).manifest
    precision = ", ".join(f"{component} {arithmetic}" for component, arithmetic in manifest.profile.precision)
    console.line(f"profile {manifest.profile.name}: {manifest.profile.backend}, {precision}")
    console.line(f"checkpoint {manifest.checkpoint.root} ({manifest.checkpoint.layout})")
    if manifest.student is not None:
        _tell_folded(manifest, manifest.student)
    for name, adapter in manifest.adapters.items():
        console.line(f"adapter {_bound(name, adapter.distilled)}; {adapter.mode}, {adapter.path}")
    rows = [
        (name, str(engine.instances), str(len(engine.weights)), _difference(engine), f"{engine.tolerance:.1e}")
        for name, engine in manifest.graphs.items()
    ]
    console.table("engines", ("graph", "instances", "weights", "difference", "tolerance"), rows)


def _tell_folded(manifest: Manifest, student: Distilled) -> None:
    """The schedule of a store that has one, and the weights that it has been spared."""
    from engines.profile import component_of

    folded = sum(manifest.tables[one].weights_bytes for one in manifest.partitions)
    loop = manifest.bound_bytes([graph for graph in manifest.graphs if component_of(graph) == "denoiser"])
    context = manifest.bound_bytes(["context"])
    console.line(_bound(student.name, student))
    console.line(
        f"transformer: {amount(loop + context + folded)}, of which {amount(loop)} in every forward, "
        f"{amount(context)} once a request, and {amount(folded)} in the build alone, which made the "
        f"tables of its schedule of them"
    )


def _bound(name: str, distilled: Distilled) -> str:
    """What a few-step model binds requests to."""
    schedule = distilled.schedule
    return (
        f"{name}: {', '.join(distilled.tasks)} in {schedule.forwards} forwards, shifts {schedule.video_shift:g} and "
        f"{schedule.audio_shift:g}"
    )


def _inspect_checkpoint(path: Path, verify_hashes: bool) -> None:
    from export.checkpoint import Checkpoint
    from export.checkpoint.summary import summarise

    checkpoint = Checkpoint.open(path)
    summary = summarise(checkpoint)
    console.line(f"{summary.layout} layout, partitions {', '.join(summary.partitions)}, {amount(summary.nbytes)}")
    if summary.student is not None:
        base = "merged with what it holds" if checkpoint.base is None else f"of the base {checkpoint.base.root}"
        console.line(f"{summary.student.name}, {base}: {summary.student.schedule.forwards} forwards")
    console.line(f"fingerprint {summary.fingerprint}")
    rows = [
        (part.component, part.partition, f"{part.tensors:,}", f"{part.nbytes:,}", _dtypes(part.dtypes))
        for part in summary.components
    ]
    console.table("tensors", ("component", "partition", "tensors", "bytes", "dtypes"), rows)
    console.line(checkpoint.dimensions.model_dump_json(indent=2))
    if verify_hashes:
        _verify_hashes(checkpoint)


def _dtypes(stored: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {amount(count)}" for name, count in stored.items())


def _verify_hashes(checkpoint: Checkpoint) -> None:
    with console.steps() as progress:
        numbers = itertools.count(1)
        files = checkpoint.verify_hashes(lambda file: progress(Moment(next(numbers), None, str(file), "reading")))
    console.line(f"{checkpoint.root}: {len(files)} files have the SHA-256 that is listed for them")


def _bytes_on_disk(directory: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in directory.rglob("*") if file.is_file())
