"""The build is incremental, resumable, and never harms a store that works."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from engines import build as building
from engines import graph_steps, onnxruntime_steps
from engines.build import BuildError, BuildReport, build
from engines.profile import Profile
from engines.sessions.engine_set import EngineSet
from engines.steps import StepEvent, StepFailed
from engines.store import LOCK, EngineStore, StoreError
from export.checkpoint.hashes import write_sums
from plugins.distilled import Distilled, PinnedSchedule
from tests.engines import small_checkpoint
from tests.engines.conftest import use_graphs
from tests.engines.workshop import Workshop, write_profile


def files(store: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file() and path.name != LOCK}


def statuses(report: BuildReport) -> dict[str, str]:
    return {step.name: step.status for step in report.steps}


def test_second_build_does_nothing_and_says_so(workshop: Workshop) -> None:
    before = files(workshop.store)
    report = workshop.build()
    assert report.built == ()
    assert set(statuses(report).values()) == {"reused"}
    assert files(workshop.store) == before


def test_other_bytes_of_the_same_shapes_redo_only_what_reads_them(workshop: Workshop) -> None:
    engine = workshop.engine_file("attend")
    before = engine.stat().st_mtime_ns
    small_checkpoint.write(workshop.checkpoint, seed=7)
    report = workshop.build()
    assert set(report.built) == {"fl2va.bind", "ref2va.bind", "attend.compare", "table.compare", "manifest"}
    assert engine.stat().st_mtime_ns == before
    hidden = torch.randn(9, small_checkpoint.WIDTH)
    mixed = EngineSet.open(workshop.store).run("attend", {"hidden": hidden})["mixed"]
    expected = small_checkpoint.expected(small_checkpoint.SmallCheckpoint(workshop.checkpoint), "fl2va", 0, hidden)
    assert torch.allclose(mixed.double(), expected, atol=1e-5)  # float32 against float64, values of order 1


def test_other_weights_of_the_same_shapes_are_not_resumed_with(workshop: Workshop) -> None:
    assert workshop.build(resume=True).built == ()
    small_checkpoint.write(workshop.checkpoint, seed=7)
    with pytest.raises(BuildError, match=r"was begun with other weights .*; leave out --resume to build it anew"):
        workshop.build(resume=True)


def test_a_build_of_another_checkpoint_that_was_interrupted_is_resumed_with_nothing_of_the_first(
    workshop: Workshop,
) -> None:
    small_checkpoint.write(workshop.checkpoint, seed=7)
    workshop.build(only="tokenizer")  # the others are still those of the first checkpoint
    assert {"attend.compare", "table.compare"} <= set(workshop.build(resume=True).built)


def test_resuming_takes_the_same_profile_from_another_place_and_no_other_one(workshop: Workshop) -> None:
    moved = workshop.root / "moved.toml"
    moved.write_bytes(workshop.profile.read_bytes())
    assert build(workshop.checkpoint, moved, workshop.store, resume=True).built == ("manifest",)
    with pytest.raises(
        BuildError, match=rf"with profile {moved}; profile {workshop.baked_profile} now differs from that in weights;"
    ):
        build(workshop.checkpoint, workshop.baked_profile, workshop.store, resume=True)


def test_files_are_compared_with_the_checkpoints_own_hashes_whenever_they_change(workshop: Workshop) -> None:
    weights = workshop.checkpoint / "fl2va.safetensors"
    write_sums(workshop.checkpoint, [weights])
    assert statuses(workshop.build())["hashes"] == "built"
    assert statuses(workshop.build())["hashes"] == "reused"
    small_checkpoint.write(workshop.checkpoint, seed=7)
    with pytest.raises(StepFailed, match=r"hashes failed: .*fl2va\.safetensors: sha256"):
        workshop.build()
    assert EngineStore.open(workshop.store)


def test_another_configuration_emits_anew(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(graph: object) -> object:
        raise RuntimeError("emitting")

    monkeypatch.setattr(graph_steps, "emit", emit)
    assert workshop.build().built == ()
    monkeypatch.setattr(small_checkpoint.SmallCheckpoint, "config", lambda self, *args: {"norm_eps": 1e-6})
    with pytest.raises(StepFailed, match=r"attend\.emit failed: emitting"):
        workshop.build()


def test_a_profile_that_differs_only_at_run_time_rewrites_only_the_manifest(workshop: Workshop) -> None:
    write_profile(workshop.profile, partitions='["fl2va", "ref2va"]', threads="2")
    assert workshop.build().built == ("manifest",)
    assert EngineStore.open(workshop.store).manifest.profile.threads == 2


def test_both_partitions_share_one_engine(workshop: Workshop) -> None:
    manifest = EngineStore.open(workshop.store).manifest
    assert len(list((workshop.store / "engines").iterdir())) == len(manifest.graphs) == 2
    places = [manifest.bindings[partition]["attend"][0]["qkv.weight"].file for partition in ("fl2va", "ref2va")]
    assert [Path(manifest.weight_files[i].path).name for i in places] == ["fl2va.safetensors", "ref2va.safetensors"]


def test_a_failed_step_keeps_the_old_store_and_the_next_build_resumes(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_checkpoint.write(workshop.checkpoint, seed=3)
    compare = graph_steps.compare

    def broken(engine: object, instance: int) -> object:
        if engine.graph.name == "table":  # type: ignore[attr-defined]
            raise RuntimeError("the disk is on fire")
        return compare(engine, instance)  # type: ignore[arg-type]

    monkeypatch.setattr(graph_steps, "compare", broken)
    events: list[StepEvent] = []
    with pytest.raises(StepFailed, match=r"table\.compare failed: the disk is on fire") as failure:
        workshop.build(progress=events.append)
    report = failure.value.report
    assert (report.status, events[-1].status, events[-1].name) == ("failed", "failed", "table.compare")
    assert "RuntimeError: the disk is on fire" in report.log.read_text()
    assert report.reproduce.split()[-2:] == ["--step", "table.compare"]
    EngineSet.open(workshop.store).run("attend", {"hidden": torch.zeros(4, small_checkpoint.WIDTH)})

    monkeypatch.setattr(graph_steps, "compare", compare)
    resumed = statuses(workshop.build())
    assert (resumed["attend.compare"], resumed["table.compare"]) == ("reused", "built")


def test_an_interrupted_first_build_is_not_a_store(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(graph: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(graph_steps, "emit", stop)
    fresh = workshop.root / "fresh"
    with pytest.raises(KeyboardInterrupt):
        build(workshop.checkpoint, workshop.profile, fresh)
    with pytest.raises(StoreError, match="h3trt engines"):
        EngineStore.open(fresh)


def test_a_damaged_engine_is_built_again(workshop: Workshop) -> None:
    engine = workshop.engine_file("attend")
    data = engine.read_bytes()
    engine.write_bytes(data[:-1])
    assert workshop.build().built == ("attend.lower",)
    assert engine.read_bytes() == data


def test_a_lost_manifest_is_written_again(workshop: Workshop) -> None:
    (workshop.store / "manifest.json").unlink()
    assert workshop.build().built == ("manifest",)


def test_a_step_can_be_done_alone(workshop: Workshop) -> None:
    before = files(workshop.store / "engines")
    report = workshop.build(only="attend.compare")
    assert report.built == ("attend.compare",)
    assert report.steps[-1].name == "attend.compare"
    assert files(workshop.store / "engines") == before
    with pytest.raises(BuildError, match=r"step 'attend\.paint': must be one of tokenizer, fl2va\.bind"):
        workshop.build(only="attend.paint")


def test_progress_counts_every_step(workshop: Workshop) -> None:
    events: list[StepEvent] = []
    report = workshop.build(progress=events.append)
    total = len(report.steps)
    assert [event.index for event in events if event.status == "started"] == list(range(1, total + 1))
    assert {event.total for event in events} == {total}
    assert Counter(event.status for event in events) == {"started": total, "reused": total}


def test_an_unused_tensor_is_refused_by_file_and_key(workshop: Workshop) -> None:
    file = workshop.checkpoint / "ref2va.safetensors"
    stored = {key: small_checkpoint.value(tensor) for key, tensor in small_checkpoint.read(file).items()}
    small_checkpoint.save(file, {**stored, "blocks.0.gate.weight": torch.zeros(3)})
    with pytest.raises(StepFailed, match=r"ref2va.bind failed.*ref2va.safetensors: blocks.0.gate.weight"):
        workshop.build()


def test_partitions_that_differ_in_structure_are_not_served_by_one_engine(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(checkpoint: small_checkpoint.SmallCheckpoint, profile: Profile, partition: str, weights: Path) -> object:
        graphs = small_checkpoint.graphs(checkpoint, profile, partition, weights)
        if partition == "fl2va":
            return graphs
        flipped = [{**w, "out.bias": w["out.bias"].view(2, -1).view(-1)} for w in graphs[0].weights]
        return dataclasses.replace(graphs[0], weights=tuple(flipped)), graphs[1]

    use_graphs(monkeypatch, other)
    with pytest.raises(StepFailed, match="graph attend of ref2va differs from that of fl2va"):
        workshop.build()


def test_a_partition_that_the_checkpoint_lacks_is_refused_before_anything_is_built(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        building.Checkpoint, "open", lambda path: small_checkpoint.SmallCheckpoint(path, partitions=("fl2va",))
    )
    with pytest.raises(BuildError, match=r"has no 'ref2va'; must be of \['fl2va'\]"):
        workshop.build()


def test_a_profile_without_a_partition_that_the_student_has_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(workshop.profile, partitions='["fl2va"]')
    schedule = PinnedSchedule(forwards=4, video_shift=12.0, audio_shift=3.0)
    merged = Distilled(name="merged", family="merged", tasks=("ref2va",), schedule=schedule)
    opened = small_checkpoint.SmallCheckpoint(workshop.checkpoint, partitions=("ref2va",), student=merged)
    monkeypatch.setattr(building.Checkpoint, "open", lambda path: opened)
    with pytest.raises(BuildError, match=r"partitions = \['fl2va'\]: .* no task of these; must be of \['ref2va'\]"):
        workshop.build()


def test_files_of_replaced_engines_are_removed(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    old = workshop.engine_file("attend")
    lower = onnxruntime_steps.backend.lower

    def renamed(model: object) -> object:
        engine = lower(model)  # type: ignore[arg-type]
        engine.producer_name = "another"
        return engine

    monkeypatch.setattr(onnxruntime_steps.backend, "lower", renamed)
    monkeypatch.setattr(onnxruntime_steps, "describe_backend", lambda backend: {"source": "another"})
    workshop.build()
    assert not old.exists()
    assert workshop.engine_file("attend") != old


def test_baking_and_back(workshop: Workshop) -> None:
    report = build(workshop.checkpoint, workshop.baked_profile, workshop.store)
    bakes = {f"{graph}.bake.{partition}" for graph in ("attend", "table") for partition in ("fl2va", "ref2va")}
    assert set(report.built) == {*bakes, "manifest"}
    assert set(workshop.build().built) == {"manifest"}
    assert len(list((workshop.store / "engines").iterdir())) == 2


def test_a_second_builder_waits_and_says_so(workshop: Workshop) -> None:
    events: list[StepEvent] = []
    waiting = threading.Event()

    def watch(event: StepEvent) -> None:
        events.append(event)
        waiting.set()

    builder = threading.Thread(target=workshop.build, kwargs={"progress": watch})
    with FileLock(workshop.store / LOCK):
        builder.start()
        assert waiting.wait(60)
        assert [event.name for event in events] == [f"waiting for another build of {workshop.store}"]
    builder.join(60)
    assert events[-1].name == "manifest"
