"""The whole pipeline in this process, on the engines of the miniature: what a request may rely on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.events import Cancellation, Cancelled, Event
from runtime.intake import Taken
from runtime.modulation import Modulation, ModulationCache
from runtime.pipeline import Pipeline
from runtime.probe import inspect_mp4
from runtime.tail import ENCODER_THREAD

SMALLEST: dict[str, Any] = {"duration": 4, "aspect_ratio": "1:1", "width": 256, "height": 256}
PROMPT = "A red fox runs over fresh snow"


@pytest.fixture(scope="module")
def pipeline(store: Path) -> Pipeline:
    return Pipeline.open(store)


def request(pipeline: Pipeline, prompt: str = PROMPT, **changes: Any) -> Taken:
    return pipeline.take(prompt, {**SMALLEST, "num_inference_steps": 2, "seed": 7, **changes})


def latents(pipeline: Pipeline, taken: Taken) -> tuple[torch.Tensor, torch.Tensor]:
    encoded = pipeline.encode(taken, lambda event: None, Cancellation())
    (found,) = pipeline.denoise(taken.resolved, encoded, lambda event: None, Cancellation())
    return found


def rms(tensor: torch.Tensor) -> float:
    return tensor.square().mean().sqrt().item()


def test_a_request_gives_the_same_bytes_twice_and_what_it_asked_for(pipeline: Pipeline) -> None:
    taken, resolved = request(pipeline), request(pipeline).resolved
    clips = [clip for _ in range(2) for clip in pipeline.generate(taken, lambda event: None, Cancellation())]
    assert clips[0] == clips[1]
    report = inspect_mp4(clips[0])
    assert report.problems(resolved.width, resolved.height, resolved.frames) == []
    # Case 18: sound in both channels, around zero, not constant.
    assert report.audio.channels == 2
    assert report.audio.rms > 1e-3
    assert abs(report.audio.mean) < report.audio.rms / 10


def test_seed_and_prompt_move_the_final_latents(pipeline: Pipeline) -> None:
    base = latents(pipeline, request(pipeline))
    for change in ({"seed": 8}, {"prompt": "Rain falls on a tin roof at night"}):
        other = latents(pipeline, request(pipeline, **change))
        for ours, theirs in zip(base, other, strict=True):
            # 0.1 is a tenth of the latents' own scale: a server that ignores prompt or seed shows 0.
            assert rms(ours - theirs) > 0.1, change


def test_both_seed_conventions_share_the_video_noise_only(pipeline: Pipeline) -> None:
    ours = pipeline.noise(request(pipeline).resolved)
    theirs = pipeline.noise(request(pipeline, seed_convention="vllm-omni").resolved)
    assert torch.equal(ours.video, theirs.video)
    assert not torch.equal(ours.audio_rows, theirs.audio_rows)


@pytest.mark.parametrize(
    ("stage", "unit"), [("encode", "text encoder layer"), ("denoise", "forward"), ("decode", "decoder tile")]
)
def test_a_cancelled_request_does_no_further_unit_of_work(pipeline: Pipeline, stage: str, unit: str) -> None:
    cancellation, seen = Cancellation(), []

    def cancel_in_stage(event: Event) -> None:
        seen.append(event)
        if event.stage == stage and event.index == 1:
            cancellation.cancel()

    with pytest.raises(Cancelled, match=unit):
        list(pipeline.generate(request(pipeline), cancel_in_stage, cancellation))
    assert (seen[-1].stage, seen[-1].index) == (stage, 1), "one unit was done, and nothing after it"
    assert ENCODER_THREAD not in [one.name for one in threading.enumerate()]
    assert all(pipeline.generate(request(pipeline), lambda event: None, Cancellation()))


def test_fragments_leave_while_later_tiles_are_decoded(pipeline: Pipeline) -> None:
    order: list[Event | bytes] = []
    taken = request(pipeline, media={"container": "fragmented"})
    (mp4,) = pipeline.generate(taken, order.append, Cancellation(), lambda index, piece: order.append(piece))
    assert b"".join(one for one in order if isinstance(one, bytes)) == mp4
    after = order[next(place for place, one in enumerate(order) if isinstance(one, bytes)) :]
    assert [one for one in after if isinstance(one, Event)], "the first fragment left before the last tile was decoded"


def test_progress_counts_every_unit_of_every_stage(pipeline: Pipeline) -> None:
    events: list[Event] = []
    taken, resolved = request(pipeline), request(pipeline).resolved
    assert len(list(pipeline.generate(taken, events.append, Cancellation()))) == 1
    totals = {"encode": 50, "denoise": resolved.forwards, "decode": (resolved.frames - 5) // 17}
    for stage, total in totals.items():
        assert [e.index for e in events if e.stage == stage] == list(range(total + 1))
        assert {e.total for e in events if e.stage == stage} == {total}
    assert [e.seconds for e in events] == sorted(e.seconds for e in events)


def test_only_the_engines_of_the_opened_stages_run(store: Path) -> None:
    pipeline = Pipeline.open(store, stages=("encode",))
    taken = request(pipeline)
    encoded = pipeline.encode(taken, lambda event: None, Cancellation())
    with pytest.raises(ValueError, match="not open"):
        list(pipeline.denoise(taken.resolved, encoded, lambda event: None, Cancellation()))


def graphs_run(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Graph and instance of every run from now on; "leaves GRAPH" where what it holds for a stage is freed."""
    engines, ran = pipeline._engines, []
    run, leave = engines.run, engines._backend.leave

    def note(graph: str, inputs: Any, instance: int = 0, *more: Any, **named: Any) -> Any:
        ran.append((graph, instance))
        return run(graph, inputs, instance, *more, **named)

    def note_leave(graphs: Any) -> None:
        ran.extend((f"leaves {graph}", 0) for graph in graphs)
        leave(graphs)

    monkeypatch.setattr(engines, "run", note)
    monkeypatch.setattr(engines._backend, "leave", note_leave)
    return ran


def test_tables_are_made_layer_by_layer_before_the_first_step_and_their_weights_leave(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where weights come from the host, each layer's then come once a schedule, and take no memory from the blocks."""
    pipeline = Pipeline.open(store, stages=("encode", "denoise"))
    ran = graphs_run(pipeline, monkeypatch)
    first = latents(pipeline, request(pipeline))
    instances = pipeline.manifest.graphs["modulation.adaln"].instances
    tables = [instance for graph, instance in ran if graph == "modulation.adaln"]
    assert tables == sorted([*range(instances)] * 2)
    order = [graph for graph, _ in ran]
    for graph in ("context", "modulation.adaln"):
        assert order.index(f"leaves {graph}") < order.index("prologue")
    ran.clear()
    monkeypatch.setattr(pipeline._denoisers["fl2va"], "_cache", ModulationCache(limit=0))
    for ours, theirs in zip(first, latents(pipeline, request(pipeline)), strict=True):
        assert torch.equal(ours, theirs), "a host without room for a schedule makes a table for each step"
    assert [i for graph, i in ran if graph == "modulation.adaln"] == [*range(instances)] * 2


@pytest.fixture
def table() -> Callable[[int], Modulation]:
    return lambda size: Modulation((torch.zeros(size, dtype=torch.uint8),), torch.zeros(0, dtype=torch.uint8))


def test_the_modulation_cache_drops_the_least_recently_used_beyond_its_bytes(
    table: Callable[[int], Modulation],
) -> None:
    cache = ModulationCache(limit=100)
    first, second, third = table(40), table(50), table(30)
    cache.put(("a",), first)
    cache.put(("b",), second)
    assert cache.get(("a",)) is first
    cache.put(("c",), third)
    assert cache.get(("b",)) is None, "used least recently"
    assert cache.get(("a",)) is first
    assert cache.get(("c",)) is third


def test_the_modulation_cache_keeps_nothing_larger_than_itself(table: Callable[[int], Modulation]) -> None:
    cache = ModulationCache(limit=100)
    cache.put(("small",), table(60))
    cache.put(("large",), table(101))
    assert len(cache) == 1
    assert cache.get(("large",)) is None
