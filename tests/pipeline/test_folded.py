"""A store of a model that pins its schedule: its AdaLN tables are made by the build, and their weights by no server."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from engines import build as building
from engines import table_step
from engines.build import BuildReport, build
from engines.store import MANIFEST, EngineStore, Manifest, StoreError
from engines.table_step import TableWeights
from export.checkpoint import Checkpoint
from export.checkpoint.expressions import Weight
from h3trt.cli import app
from h3trt.reference import ReferencePipeline
from h3trt.verify import pipeline_checks
from h3trt.verify_requests import requests
from plugins.distilled import Distilled, PinnedSchedule
from plugins.schedule import Schedule
from runtime.admission import MemoryModel
from runtime.denoiser import State
from runtime.events import Cancellation, Reporter, Units, ignore
from runtime.intake import Taken
from runtime.modulation import stored_tables
from runtime.pipeline import Pipeline
from runtime.refusal import RequestError
from runtime.rehearsal import rehearsals, rehearse

SCHEDULE = PinnedSchedule(forwards=4, positions=(0.999, 0.749, 0.5, 0.25, 0.0), video_shift=12.0, audio_shift=3.0)
STUDENT = Distilled(name="fasth3-v1", family="fasth3_v1", tasks=("t2va",), schedule=SCHEDULE)
SMALLEST: dict[str, Any] = {"duration": 4, "aspect_ratio": "1:1", "width": 256, "height": 256, "seed": 7}
PROMPT = "A red fox runs over fresh snow"


def is_folded(key: str) -> bool:
    """Whether a tensor of the native layout does nothing but make AdaLN tables."""
    return key.startswith("time_embedder.") or ".adaln_proj." in key


def pinned(checkpoint: Path, student: Distilled = STUDENT) -> Checkpoint:
    """The checkpoint, were it such a student."""
    opened = Checkpoint.open(checkpoint)
    opened.student = student
    return opened


def fold(store: Path, checkpoint: Path, student: Distilled = STUDENT) -> BuildReport:
    """Brings a store up to date with that."""
    opened = pinned(checkpoint, student)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building.Checkpoint, "open", lambda path: opened)
        return build(checkpoint, "cpu", store)


@pytest.fixture(scope="module")
def checkpoint(store: Path) -> Path:
    return Path(EngineStore.open(store).manifest.checkpoint.root)


@pytest.fixture(scope="module")
def folded(store: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration's store, brought up to date with a student of the same weights."""
    directory = tmp_path_factory.mktemp("folded") / "engines"
    shutil.copytree(store, directory)
    report = fold(directory, checkpoint)
    compared = {"modulation.time.compare", "modulation.adaln.compare"}
    assert set(report.built) <= {"fl2va.bind", *compared, "table.fl2va", "manifest"}, "the engines are as they were"
    return directory


@pytest.fixture
def own(folded: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(folded, tmp_path / "engines"))


@pytest.fixture(scope="module")
def transformer(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    files = sorted((checkpoint / "FL2VA" / "transformer").glob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def manifest(store: Path) -> Manifest:
    return EngineStore.open(store).manifest


def states(pipeline: Pipeline, taken: Taken, schedule: Schedule) -> Iterator[State]:
    """The state after each step of a schedule, whatever the request's own is."""
    denoiser = pipeline._denoisers["fl2va"]
    encoded = pipeline.encode(taken, ignore, Cancellation())
    sequence = denoiser.sequence(encoded.text, pipeline.layout(taken.resolved, encoded.tags))
    start = pipeline.start(taken.resolved, encoded)
    units = Units("denoise", schedule.forwards, Reporter.silent(), Cancellation())
    yield from denoiser.sample(sequence, schedule, taken.resolved.quality, *start, units)


def test_every_state_is_bit_equal_to_that_of_the_unfolded_store(store: Path, folded: Path) -> None:
    schedule = Schedule.pinned(SCHEDULE)
    free, bound = Pipeline.open(store), Pipeline.open(folded)
    unfolded = free.take(PROMPT, {**SMALLEST, "num_inference_steps": 4})
    taken = bound.take(PROMPT, SMALLEST)
    assert taken.resolved.positions == SCHEDULE.positions
    pairs = list(zip(states(free, unfolded, schedule), states(bound, taken, schedule), strict=True))
    assert len(pairs) == 4
    for ours, theirs in pairs:
        assert torch.equal(ours.video, theirs.video)
        assert torch.equal(ours.audio, theirs.audio)
    (latents,) = bound.denoise(taken.resolved, bound.encode(taken, ignore, Cancellation()), ignore, Cancellation())
    assert torch.equal(latents[0], free.latents(unfolded.resolved, pairs[-1][0])[0]), "and so the request runs it"


def test_every_step_is_what_diffusers_makes_on_its_sigmas(folded: Path, checkpoint: Path) -> None:
    pipeline = Pipeline.open(folded)
    (taken,) = requests(pipeline, 49, 7)
    assert taken.resolved.forwards == 4
    checks = list(pipeline_checks(pipeline, ReferencePipeline(pinned(checkpoint)), taken))
    assert len([check for check in checks if "latents after step" in check.name]) == 4
    assert [f"{check.title}: {check.measured}" for check in checks if not check.passed] == []


def test_no_graph_and_no_binding_of_the_folded_weights_is_left(
    store: Path, folded: Path, transformer: Mapping[str, torch.Tensor]
) -> None:
    before, after = manifest(store), manifest(folded)
    assert set(before.graphs) - set(after.graphs) == {"modulation.time", "modulation.adaln"}
    assert after.bindings.keys() == {"fl2va"}
    assert after.bindings["fl2va"].keys() == after.graphs.keys()
    assert (after.partitions, after.student) == (("fl2va",), STUDENT)
    folded_bytes = sum(tensor.nbytes for key, tensor in transformer.items() if is_folded(key))
    assert after.tables["fl2va"].weights_bytes == folded_bytes
    one_of_two = {"fl2va": before.bindings["fl2va"]}
    whole = before.model_copy(update={"student": STUDENT, "bindings": one_of_two}).bound_bytes(before.graphs)
    assert whole - after.bound_bytes(after.graphs) == folded_bytes


def test_the_tables_are_what_the_formula_makes_of_the_weights(
    folded: Path, transformer: Mapping[str, torch.Tensor]
) -> None:
    """spec/model.md 2.2, steps 2 and 3, in float64: sinusoids, two layers, silu, one projection a layer."""
    found = stored_tables(folded, manifest(folded))["fl2va"]
    w = {key: tensor.double() for key, tensor in transformer.items() if is_folded(key)}
    width = w["time_embedder.proj_in.weight"].shape[1]
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    for timesteps in Schedule.pinned(SCHEDULE).slots():
        angles = timesteps.double()[:, None] * frequencies
        hidden = torch.cat([angles.cos(), angles.sin()], dim=1)
        hidden = hidden @ w["time_embedder.proj_in.weight"].T + w["time_embedder.proj_in.bias"]
        hidden = torch.nn.functional.silu(hidden) @ w["time_embedder.proj_out.weight"].T
        embedded = torch.nn.functional.silu(hidden + w["time_embedder.proj_out.bias"])
        table = found.step(timesteps)
        names = [*(f"blocks.{i}" for i in range(len(table.blocks))), "final_layer"]
        for name, layer in zip(names, (*table.blocks, table.head), strict=True):
            linear = f"{name}.adaln_proj.linear"
            expected = (embedded @ w[f"{linear}.weight"].T + w[f"{linear}.bias"]).reshape(layer.shape)
            # Sums of 128 float32 products, relative to the largest of them.
            assert (layer.double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_weights_that_an_adapter_changes_are_computed_one_instance_at_a_time(
    folded: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expression that changes nothing gives the same bits; one that does is what the table is made from."""
    plain = manifest(folded).tables["fl2va"]
    held: list[int] = []
    opened = table_step.TableStep._opened

    def note(self: Any, graph: str, instances: Any, *more: Any) -> Any:
        held.append(len(instances))
        return opened(self, graph, instances, *more)

    monkeypatch.setattr(table_step.TableStep, "_opened", note)

    def rebuilt(name: str, change: Callable[[Weight], Weight]) -> Manifest:
        of = TableWeights.of

        def changed(graphs: Any) -> TableWeights:
            weights = of(graphs)
            adaln = tuple({n: change(w) for n, w in instance.items()} for instance in weights.adaln)
            return TableWeights(weights.time, adaln)

        monkeypatch.setattr(TableWeights, "of", changed)
        store = shutil.copytree(folded, tmp_path / name)
        report = fold(store, checkpoint)
        monkeypatch.setattr(TableWeights, "of", of)
        assert set(report.built) == {"table.fl2va", "manifest"}
        return manifest(store)

    same = rebuilt("same", lambda weight: weight.view(*weight.shape)).tables["fl2va"]
    assert same.file.sha256 == plain.file.sha256
    assert same.weights_sha256 == plain.weights_sha256
    assert set(held) == {1}
    mirrored = rebuilt("mirrored", lambda weight: Weight.concat([weight.rows(1, weight.shape[0]), weight.rows(0, 1)]))
    assert mirrored.tables["fl2va"].file.sha256 != plain.file.sha256


def test_another_schedule_makes_other_tables_and_the_same_one_none(own: Path, checkpoint: Path) -> None:
    assert fold(own, checkpoint).built == ()
    first = manifest(own).tables["fl2va"]
    moved = SCHEDULE.model_copy(update={"positions": (1.0, 0.7, 0.4, 0.15, 0.0)})
    report = fold(own, checkpoint, STUDENT.model_copy(update={"schedule": moved}))
    assert set(report.built) == {"table.fl2va", "manifest"}
    second = manifest(own).tables["fl2va"]
    assert second.weights_sha256 == first.weights_sha256
    assert second.file.sha256 != first.file.sha256
    assert sorted(path.name for path in (own / "tables").iterdir()) == [Path(second.file.path).name]


def test_tables_wait_for_a_machine_that_runs_their_engine(
    own: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = SCHEDULE.model_copy(update={"video_shift": 10.0})
    monkeypatch.setattr(table_step, "missing_to_run", lambda profile: "its engines run on another machine")
    report = fold(own, checkpoint, STUDENT.model_copy(update={"schedule": moved}))
    assert {step.name: step.facts["deferred"] for step in report.deferred} == {
        "table.fl2va": "its engines run on another machine",
        "manifest": "waits for table.fl2va",
    }
    assert manifest(own).student == STUDENT, "the store that was there is still whole"


def test_a_store_with_damaged_or_foreign_tables_is_refused(own: Path) -> None:
    file = own / manifest(own).tables["fl2va"].file.path
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match=r"tables/fl2va\..*: is not the file that was built"):
        EngineStore.open(own)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tables: tables.clear(), r"tables\.fl2va: is missing; fasth3-v1 pins its schedule"),
        (lambda tables: tables.update(other=tables["fl2va"]), r"tables\.other: is of no student, and of no adapter"),
        (lambda tables: tables["fl2va"]["timesteps"].pop(), r"tables\.fl2va\.timesteps: 4 steps of 4 slots"),
        (lambda tables: tables["fl2va"]["head"].__setitem__(0, 1 << 40), r"tables\.fl2va\.head: \[4, 4, "),
        (lambda tables: tables["fl2va"]["blocks"][1].__setitem__(1, 1), r"tables\.fl2va\.blocks: \[4, 2, 12, "),
    ],
    ids=["none", "of nobody", "a step short", "beyond the file", "layers short"],
)
def test_a_manifest_that_does_not_fit_its_tables_is_refused(
    own: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    written = json.loads((own / MANIFEST).read_text())
    change(written["tables"])
    (own / MANIFEST).write_text(json.dumps(written))
    with pytest.raises(StoreError, match=told):
        EngineStore.open(own)


def test_tables_of_other_timesteps_are_not_run_with(folded: Path) -> None:
    pipeline = Pipeline.open(folded)
    other = Schedule.of(4, 6.0, 3.0)
    with pytest.raises(StoreError, match=r"tables\.fl2va: has no step of timesteps"):
        list(states(pipeline, pipeline.take(PROMPT, SMALLEST), other))


def test_its_requests_have_its_schedule_and_its_memory_no_cache_of_others(store: Path, folded: Path) -> None:
    pipeline = Pipeline.open(folded, stages=("encode",))
    with pytest.raises(RequestError, match="the served model fasth3-v1 has exactly 4 evaluations"):
        pipeline.take(PROMPT, {**SMALLEST, "num_inference_steps": 49})
    with pytest.raises(RequestError, match="is not what the served model was distilled for"):
        pipeline.take(PROMPT, {**SMALLEST, "task": "fl2va"})
    free = Pipeline.open(store, stages=("encode",)).take(PROMPT, {**SMALLEST, "num_inference_steps": 4})
    assert pipeline.take(PROMPT, SMALLEST).memory_bytes < free.memory_bytes
    assert MemoryModel.of(manifest(folded)).modulation_cache == 0


def test_a_server_of_it_rehearses_what_its_requests_run(folded: Path) -> None:
    pipeline = Pipeline.open(folded)
    (first, *_, last) = rehearsals(pipeline.manifest)
    assert "num_inference_steps" not in {**first.params, **last.params}
    assert rehearse(pipeline, last, ignore).resolved.forwards == 4


def test_inspecting_it_tells_the_bytes_before_and_after(folded: Path, transformer: Mapping[str, torch.Tensor]) -> None:
    found = CliRunner().invoke(app, ["inspect", str(folded)])
    assert found.exit_code == 0, found.output
    told = " ".join(found.output.split())
    used = {key: tensor.nbytes for key, tensor in transformer.items() if key != "rope.inv_freq"}
    folded_bytes = sum(size for key, size in used.items() if is_folded(key))
    context = sum(size for key, size in used.items() if key.startswith(("condition_proj.", "token_refiner.")))
    whole, loop = sum(used.values()), sum(used.values()) - folded_bytes - context
    megabytes = [f"{count / 1e6:.1f} MB" for count in (whole, loop, context, folded_bytes)]
    assert "fasth3-v1: t2va in 4 forwards, shifts 12 and 3" in told
    assert "transformer: {}, of which {} in every forward, {} once a request, and {} in the build".format(
        *megabytes
    ) in told  # fmt: skip
