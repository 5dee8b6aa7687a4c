"""A profile with `row_chunk`: blocks in segments over chunks of rows give the whole blocks' request."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engines.build import build
from engines.profile import PROFILES
from engines.store import EngineStore
from runtime.block import SEGMENTS
from runtime.events import Cancellation
from runtime.pipeline import Pipeline

ROW_CHUNK = 512
SMALLEST = {"duration": 4, "aspect_ratio": "1:1", "width": 256, "height": 256, "num_inference_steps": 2, "seed": 7}


@pytest.fixture(scope="module")
def segmented(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration's store, brought up to date with a profile that chunks rows."""
    directory = tmp_path_factory.mktemp("segmented")
    profile = directory / "chunked.toml"
    profile.write_text(f"row_chunk = {ROW_CHUNK}\n" + (PROFILES / "cpu.toml").read_text())
    shutil.copytree(store, directory / "engines")
    report = build(EngineStore.open(store).manifest.checkpoint.root, profile, directory / "engines")
    assert {step.split(".")[0] for step in report.built} == {"fl2va", "ref2va", "block", "manifest"}
    return report.store


def latents(store: Path, quality: str = "lossless") -> tuple[torch.Tensor, torch.Tensor]:
    pipeline = Pipeline.open(store, stages=("encode", "denoise"))
    taken = pipeline.take("A red fox runs over fresh snow", {**SMALLEST, "quality": quality})
    encoded = pipeline.encode(taken, lambda event: None, Cancellation())
    rows = pipeline.layout(taken.resolved, encoded.tags).rows
    assert rows > 3 * ROW_CHUNK
    assert rows % ROW_CHUNK, "the last chunk is a shorter one"
    (found,) = pipeline.denoise(taken.resolved, encoded, lambda event: None, Cancellation())
    return found


def test_a_request_in_chunks_is_the_request(store: Path, segmented: Path) -> None:
    graphs = EngineStore.open(segmented).manifest.graphs
    assert set(SEGMENTS) <= set(graphs)
    assert "block" not in graphs
    for ours, whole in zip(latents(segmented), latents(store), strict=True):
        # Latents are of scale 1. The sums are the same; a product of other heights may add in another order.
        assert (ours - whole).abs().max() < 2e-5


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("quality", ["skip", "sage"])
def test_a_tier_in_chunks_is_the_tier(store: Path, segmented: Path, quality: str) -> None:
    assert {"block.attend.skip", "block.attend.sage+skip"} <= set(EngineStore.open(segmented).manifest.graphs)
    # Other sums put a few values to the other side of the middle of two E4M3 values.
    limit = 2e-5 if quality == "skip" else 2e-3
    for ours, whole in zip(latents(segmented, quality), latents(store, quality), strict=True):
        assert (ours - whole).abs().max() < limit
