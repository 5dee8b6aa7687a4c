"""The quality bench compares each tier with the one that changes least, and with itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import quality
from engines.profile import Profile
from tests.request.sizes import MINIATURE

STRENGTH = {"lossless": 0.0, "sage": 0.01, "skip": 0.1, "sage+skip": 0.2}
"""How far a tier moves the latents here."""


class Drifting:
    """Clips whose latents are those of the seed, moved by the tier, and by a little at every run."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, str]] = []

    def __call__(self, pipeline: object, params: dict[str, Any]) -> quality.Clip:
        seed, tier = params["seed"], params["quality"]
        exact = torch.randn(4000, generator=torch.Generator().manual_seed(seed))
        moved = torch.randn(4000, generator=torch.Generator().manual_seed(100 * seed))
        latents = exact + STRENGTH[tier] * moved + 1e-6 * len(self.runs)
        self.runs.append((seed, tier))
        frames = (128 + 30 * latents[:3072].view(4, 16, 16, 3)).clamp(0, 255).to(torch.uint8)
        return quality.Clip((latents, latents), frames, latents.view(2, 2000), 1.0, None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Drifting]:
    clips = Drifting()
    monkeypatch.setattr(quality, "_clip", clips)
    resolved = SimpleNamespace(quality=SimpleNamespace(model_dump=lambda mode: {"tier": "any"}))
    pipeline: Any = SimpleNamespace(
        manifest=SimpleNamespace(profile=Profile.load("cpu"), dimensions=MINIATURE),
        take=lambda prompt, params: SimpleNamespace(resolved=resolved),
    )
    return quality.measure(pipeline, {"num_inference_steps": 4}, seeds=(1, 2)), clips


def test_every_tier_is_run_twice_for_each_seed(measured: tuple[dict[str, Any], Drifting]) -> None:
    found, clips = measured
    assert found["reference"] == "lossless"
    for seed in (1, 2):
        # Two of each, the lossless ones serving as their own.
        assert sorted(tier for s, tier in clips.runs if s == seed) == sorted(2 * list(STRENGTH))


def test_a_tier_s_distance_is_shown_beside_that_of_two_runs(measured: tuple[dict[str, Any], Drifting]) -> None:
    tiers = measured[0]["tiers"]
    errors = {name: [one["video error"] for one in tier["requests"]] for name, tier in tiers.items()}
    for name, strength in STRENGTH.items():
        assert errors[name] == pytest.approx([strength, strength], rel=0.1, abs=1e-4)
        assert all(0 < one["video error"] < 1e-4 for one in tiers[name]["run to run"])
    similar = [tiers[name]["requests"][0]["SSIM"] for name in STRENGTH]
    assert similar == sorted(similar, reverse=True)


def test_the_table_says_why_a_measure_is_left_out(measured: tuple[dict[str, Any], Drifting], tmp_path: Path) -> None:
    files = quality.write(measured[0], tmp_path)
    assert json.loads(files[0].read_text())["seeds"] == [1, 2]
    text = files[1].read_text()
    assert "LPIPS left out: no package" in text
    assert "| sage+skip, run to run |" in text
    # Frames of the lossless tier are equal, so that they have no PSNR.
    assert "| equal |" in next(line for line in text.splitlines() if line.startswith("| lossless |"))
