"""The requests that a server makes of itself: one for each range of sizes, each of the stages by itself."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from engines.profile import Profile
from engines.store import AdapterRecord, EngineStore, Manifest
from plugins.distilled import Distilled, PinnedSchedule
from runtime.events import Event
from runtime.intake import limits_of
from runtime.pipeline import STAGES, Pipeline, PipelineStage
from runtime.rehearsal import TEXT_ROWS, rehearsals, rehearse
from runtime.request import resolve
from tests.request.sizes import RELEASED


@pytest.fixture(scope="module")
def pipeline(store: Path) -> Pipeline:
    return Pipeline.open(store)


def _on(profile: str, manifest: Manifest) -> Manifest:
    """The released model on a profile."""
    return manifest.model_copy(update={"profile": Profile.load(profile), "dimensions": RELEASED})


def test_a_profile_s_ranges_of_rows_are_each_rehearsed_near_their_end(store: Path) -> None:
    manifest = _on("h200", EngineStore.open(store).manifest)
    ends = manifest.profile.shapes["rows"]
    made = [resolve(one.prompt, one.params, RELEASED) for one in rehearsals(manifest)]
    rows = [one.video_rows + one.audio_rows + TEXT_ROWS for one in made]
    first = rows[: len(ends)]
    for end, below, count in zip(reversed(ends), [*reversed(ends[:-1]), 0], first, strict=True):
        assert below < count <= end
    # Then a long prompt, and the smallest once more.
    assert rows[len(ends) :] == [first[-1], first[-1]]
    assert {one.forwards for one in made} == {1}
    assert len(made[len(ends)].prompt) == 7000


def test_without_ranges_the_smallest_clip_is_rehearsed_twice_with_other_words(store: Path) -> None:
    made = list(rehearsals(EngineStore.open(store).manifest))
    assert made[0].params == made[-1].params
    assert made[0].prompt != made[-1].prompt
    assert (made[0].params["width"], made[0].params["duration"]) == (256, 4)


@pytest.mark.parametrize("stages", [STAGES, ("encode",), ("denoise",), ("decode",)], ids="+".join)
def test_a_rehearsal_runs_the_stages_that_it_is_for(pipeline: Pipeline, stages: Collection[PipelineStage]) -> None:
    events: list[Event] = []
    rehearse(pipeline, next(rehearsals(pipeline.manifest, stages)), events.append)
    assert list(dict.fromkeys(event.stage for event in events)) == list(stages)
    assert all(any(e.stage == stage and e.index == e.total for e in events) for stage in stages)


def test_a_tier_of_quality_is_rehearsed_where_it_matters(pipeline: Pipeline) -> None:
    tiers = {tier.name for tier in pipeline.manifest.profile.tiers[1:]}
    assert tiers
    assert {one.params.get("quality") for one in rehearsals(pipeline.manifest, ["denoise"])} == {None, *tiers}
    assert {one.params.get("quality") for one in rehearsals(pipeline.manifest, ["decode"])} == {None}


def test_an_adapter_is_rehearsed_where_a_text_alone_can_choose_it(store: Path) -> None:
    turbo = Distilled(
        name="turbo",
        family="turbo",
        tasks=("t2va", "fl2va"),
        schedule=PinnedSchedule(forwards=4, video_shift=6.0, audio_shift=3.0),
    )
    references = turbo.model_copy(update={"name": "references", "tasks": ("ref2va",)})
    adapters = {
        one.name: AdapterRecord(distilled=one, partition="fl2va", mode="low_rank", path="", modulates=False)
        for one in (turbo, references)
    }
    manifest = EngineStore.open(store).manifest.model_copy(update={"adapters": adapters})
    made = [one for one in rehearsals(manifest) if "lora" in one.params]
    assert [(one.params["lora"], one.stages) for one in made] == [({"name": "turbo"}, ("denoise",))]
    assert resolve(made[0].prompt, made[0].params, RELEASED, limits_of(manifest)).forwards == 4
