"""Real plans of every graph, for both generations of RTX cards, made on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.backends.tensorrt.process import build_plan
from engines.backends.tensorrt.request import PlanResult
from engines.profile import Arithmetic
from export.emitted import Emitted
from tests.tensorrt.conftest import PROFILE, Graphs, shared
from tests.tensorrt.requests import emitted_request

ROWS = 110_592
"""Packed rows of the largest request that the profiles allow."""

MINIATURE = [
    "vision_encoder.embed",
    "vision_encoder.block",
    "vision_encoder.deepstack",
    "vision_encoder.merger",
    "text_encoder.embedding",
    "text_encoder.layer",
    pytest.param("video_encoder_tile", marks=pytest.mark.slow),
    pytest.param("audio_encoder", marks=pytest.mark.slow),
    "context",
    "modulation.time",
    "modulation.adaln",
    "prologue",
    "block",
    "epilogue",
    "video_decoder_tile",
    pytest.param("audio_decoder", marks=pytest.mark.slow),  # thousands of nodes, as in the release
]


def build(emitted: Emitted, directory: Path, baked: bool = False) -> tuple[PlanResult, int]:
    """A plan's result, and the bytes of its file."""
    request = emitted_request(emitted, directory, PROFILE.shapes, baked)
    result = build_plan(request, directory / "plan")
    assert result.warnings == ()
    return result, (directory / "plan").stat().st_size


def profiles(emitted: Emitted, directory: Path) -> int:
    return max(1, len(emitted_request(emitted, directory, PROFILE.shapes).profiles))


@pytest.mark.parametrize("name", MINIATURE)
def test_every_graph_of_the_miniature_becomes_a_plan(miniature: Graphs, tmp_path: Path, name: str) -> None:
    emitted = miniature(PROFILE.precision.denoiser, name)
    result, size = build(emitted, tmp_path)
    times = profiles(emitted, tmp_path)
    assert result.census.get("attention.fused", 0) == times * attentions(emitted)
    assert size > 100_000
    assert 100 << 20 < result.peak_host_bytes < 2 << 30


@pytest.mark.parametrize(
    ("arithmetic", "name", "census"),
    [
        ("bfloat16", "block", {"attention.fused": 1, "gemm.BFloat16": 4}),
        ("fp8", "block", {"attention.fused": 1, "gemm.FP8": 4}),
        ("bfloat16", "prologue", {"gemm.Float": 2}),
        ("bfloat16", "epilogue", {"gemm.Float": 2}),
    ],
)
def test_graphs_of_the_released_dimensions_become_plans_for_all_rows(
    released: Graphs, tmp_path: Path, arithmetic: Arithmetic, name: str, census: dict[str, int]
) -> None:
    """Up to 110,592 rows; the weights are inputs, so that the plan is small and so is what building it takes."""
    emitted = released(arithmetic, name)
    request = emitted_request(emitted, tmp_path, PROFILE.shapes)
    assert max(ranges["rows"].maximum for ranges in request.profiles) == ROWS
    result, size = build(emitted, tmp_path)
    times = len(request.profiles)
    matched = {kind: count for kind, count in result.census.items() if kind.startswith(("attention", "gemm"))}
    assert matched == {kind: times * count for kind, count in census.items()}
    assert size < 10_000_000
    assert result.peak_host_bytes < 1 << 30
    if name == "block":
        # The largest tensor alone is fc1's output of two bytes a value: what splitting the rows is for.
        assert result.activation_bytes > ROWS * 2 * 14_336 * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_block_of_one_rank_becomes_a_plan_with_two_exchanges(
    ranked: Callable[[int, str], Emitted], tmp_path: Path, ranks: int
) -> None:
    """By TensorRT's own collective, in every profile; local rows go with the rows of the sequence."""
    request = emitted_request(ranked(ranks, "block"), tmp_path, shared(ranks).axis_ends)
    assert [r["local_rows"].maximum * ranks for r in request.profiles] == [r["rows"].maximum for r in request.profiles]
    result = build_plan(request, tmp_path / "plan")
    # Of the sequence the size alone is read.
    assert all("sequence is unused or used only at compile-time" in warning for warning in result.warnings)
    times = len(request.profiles)
    assert times == len(PROFILE.shapes["rows"]) > 1
    assert result.census["collective.all_to_all"] == 2 * times
    assert result.census["attention.fused"] == times


@pytest.mark.parametrize("name", ["prologue", "epilogue"])
def test_work_on_a_ranks_own_rows_exchanges_nothing(
    ranked: Callable[[int, str], Emitted], tmp_path: Path, name: str
) -> None:
    request = emitted_request(ranked(2, name), tmp_path, shared(2).axis_ends)
    assert max(ranges["local_rows"].maximum for ranges in request.profiles) == ROWS // 2
    census = build_plan(request, tmp_path / "plan").census
    assert not [kind for kind in census if kind.startswith("collective")]


def test_a_layer_of_a_ranks_text_encoder_becomes_a_plan_with_two_sums(
    ranked: Callable[[int, str], Emitted], tmp_path: Path
) -> None:
    request = emitted_request(ranked(2, "text_encoder.layer"), tmp_path, shared(2).axis_ends)
    census = build_plan(request, tmp_path / "plan").census
    assert census["collective.all_reduce"] == 2 * len(request.profiles)


@pytest.mark.parametrize("arithmetic", ["bfloat16", "fp8"])
def test_a_block_of_the_released_dimensions_holds_its_weights_when_baked(
    released: Graphs, tmp_path: Path, arithmetic: Arithmetic
) -> None:
    emitted = released(arithmetic, "block")
    weights = sum(stored.nbytes for stored in emitted.bindings[0].values())
    result, size = build(emitted, tmp_path, baked=True)
    # Once for all of its profiles; some of the small ones, read as zeros, are folded away.
    assert result.weights_bytes == pytest.approx(weights, abs=1_000_000)
    assert -1_000_000 < size - weights < 16_000_000


def attentions(emitted: Emitted) -> int:
    return sum(node.op_type == "Attention" for node in emitted.model.graph.node)
