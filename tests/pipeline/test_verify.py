"""Verification against diffusers on the miniature; and that it does see an error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.graphs import declared_graphs, profile_graphs
from engines.profile import Partition, Profile
from engines.sessions.engine_set import EngineSet
from export.checkpoint import Checkpoint
from export.graphs.graph import Graph
from h3trt import verify as verification
from h3trt.verify import Check, engine_checks, psnr, verify


@pytest.mark.slow
def test_engines_and_pipeline_agree_with_torch_and_diffusers(store: Path) -> None:
    report = verify(store, forwards=2, seed=3, progress=lambda check: None)
    assert report.failed == ()
    measured = {check.title: check for check in report.checks}
    for task in ("t2va", "fl2va", "ref2va"):
        for name in ("token_tags", "position_ids", "text_indices", "audio_indices", "video_indices", "timesteps"):
            assert measured[f"{task} layout: {name}, unequal elements"].measured == 0
        assert measured[f"{task} noise: video rows, unequal elements"].measured == 0
        assert measured[f"{task} noise: audio rows, unequal elements"].measured == 0
        assert measured[f"{task}: final video latents"].measured <= 1e-4
        assert measured[f"{task}: final audio latents"].measured <= 1e-4
    assert measured["media: frames, PSNR in dB"].measured >= 50
    assert measured["media: waveform"].measured <= 1e-4
    assert json.loads(report.to_json())["passed"] is True


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_whole_schedule_agrees_with_diffusers(store: Path) -> None:
    assert verify(store, forwards=49, seed=11, progress=lambda check: None).failed == ()


def test_weights_of_another_transformer_are_seen(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference reads partition ref2va while the engines are bound to fl2va: every denoiser engine must differ."""

    def other_partition(
        checkpoint: Checkpoint, profile: Profile, partition: Partition, weights: Path
    ) -> tuple[Graph, ...]:
        graphs = profile_graphs(checkpoint, profile, "ref2va", weights)
        return tuple(graph for graph in graphs if graph.name in ("context", "prologue", "block", "epilogue"))

    monkeypatch.setattr(verification, "profile_graphs", other_partition)
    engines = EngineSet.open(store)
    checks = list(engine_checks(engines, Checkpoint.open(engines.manifest.checkpoint.root)))
    assert {check.name.split()[1] for check in checks if not check.passed} == {
        "context[0]",
        "prologue[0]",
        "block[0]",
        "block[1]",
        "epilogue[0]",
    }


def test_an_engine_that_is_not_finite_at_its_last_trial_only_is_seen(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_epilogue(
        checkpoint: Checkpoint, profile: Profile, partition: Partition, weights: Path
    ) -> tuple[Graph, ...]:
        return tuple(
            graph for graph in profile_graphs(checkpoint, profile, partition, weights) if graph.name == "epilogue"
        )

    engines = EngineSet.open(store)
    run, last = engines.run, max(trial["rows"] for trial in _epilogue_trials(engines))

    def broken(graph: str, inputs: Mapping[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
        outputs = run(graph, inputs, **options)
        return {k: v * math.nan if len(inputs["hidden"]) == last else v for k, v in outputs.items()}

    monkeypatch.setattr(verification, "profile_graphs", only_epilogue)
    monkeypatch.setattr(engines, "run", broken)
    checks = list(engine_checks(engines, Checkpoint.open(engines.manifest.checkpoint.root)))
    assert [check.name for check in checks] == [f"{partition} epilogue[0]" for partition in ("fl2va", "ref2va")]
    assert not any(check.passed for check in checks)


def _epilogue_trials(engines: EngineSet) -> tuple[Mapping[str, int], ...]:
    checkpoint = Checkpoint.open(engines.manifest.checkpoint.root)
    graphs = declared_graphs(checkpoint, engines.manifest.profile, "fl2va")
    return next(graph.trials for graph in graphs if graph.name == "epilogue")


@pytest.mark.parametrize(
    ("measured", "at_least", "passed"),
    [
        (1.0, False, True),
        (1.1, False, False),
        (1.0, True, True),
        (0.9, True, False),
        (math.nan, False, False),
        (math.nan, True, False),
        (math.inf, False, False),
        (-math.inf, True, False),
    ],
)
def test_a_check_keeps_its_limit(measured: float, at_least: bool, passed: bool) -> None:
    assert Check("group", "name", measured, 1.0, at_least).passed is passed


def test_psnr_of_frames() -> None:
    black = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    one_level = black + 1
    # An error of one level everywhere: 10 log10(255^2).
    assert psnr(black, one_level) == pytest.approx(48.13, abs=0.01)
    assert psnr(black, black) == math.inf
    assert psnr(black, black[:1]) == -math.inf
