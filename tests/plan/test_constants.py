"""The plans' arithmetic against the published sizes of the model (spec/model.md, spec/contract.md 2.5)."""

from __future__ import annotations

import math

import pytest

from engines.plan import Plan, Workload, make_plan
from engines.plan.weights import graph_weights
from engines.profile import Profile
from export.checkpoint.outline import Outline


def _plan(outline: Outline, seconds: float, text_rows: int, profile: str = "b300") -> Plan:
    return make_plan(Profile.load(profile), outline, Workload(seconds=seconds, text_rows=text_rows, forwards=1))


def test_the_denoiser_has_the_published_bytes_and_parameters(outline: Outline) -> None:
    assert outline.stored_bytes("denoiser") == 66_280_430_144
    assert sum(math.prod(d.shape or ()) for d in outline.parameters["denoiser"].values()) == 33_122_992_896


def test_the_projections_that_leave_the_loop_are_13_billion_parameters(outline: Outline) -> None:
    adaln = graph_weights(outline)["modulation.adaln"]
    assert sum(math.prod(d.shape or ()) for one in adaln.instances for d in one.values()) == 13_039_369_728


def test_the_encoder_that_is_used_has_its_published_size(outline: Outline) -> None:
    # 51.5 GB with the vision tower and all of its mergers, which text to video does not load: 1.15 GB of it.
    weights = graph_weights(outline)
    language = sum(sum(weights[f"text_encoder.{part}"].nbytes("bfloat16")) for part in ("embedding", "layer"))
    vision = sum(d.nbytes for name, d in outline.parameters["text_encoder"].items() if "visual" in name)
    assert language + vision == pytest.approx(51.5e9, abs=0.05e9)


@pytest.mark.parametrize(
    ("seconds", "rows", "frames", "tiles"),
    [(4, 32_612, 107, 168), (5, 37_710, 124, 196), (10, 73_386, 243, 392), (15, 109_062, 362, 588)],
)
def test_rows_and_tiles_of_a_clip(outline: Outline, seconds: float, rows: int, frames: int, tiles: int) -> None:
    plan = _plan(outline, seconds, 100)
    assert (plan.rows.total - 100, plan.frames, plan.tiles) == (rows, frames, tiles)


@pytest.mark.parametrize(
    ("seconds", "rows", "linear", "attention"),
    [(5, 37_740, 1.45e15, 2.04e15), (10, 74_050, 2.85e15, 7.86e15), (15, 109_100, 4.20e15, 1.70e16)],
)
def test_operations_of_a_forward_are_those_of_the_table(
    outline: Outline, seconds: float, rows: int, linear: float, attention: float
) -> None:
    base = {5: 37_710, 10: 73_386, 15: 109_062}[int(seconds)]
    plan = _plan(outline, seconds, rows - base, "rtx5090x2")
    cards = 2
    found = sum(plan.graph(f"block.{part}").flops.get("fp8", 0.0) for part in ("project", "finish"))
    # The table has three digits, and its rows at 10 and 15 s are rounded to three as well.
    assert cards * found == pytest.approx(linear, rel=0.005)
    assert cards * plan.graph("block.attend").flops["bfloat16"] == pytest.approx(attention, rel=0.005)


def test_a_decoder_tile_takes_its_published_operations(outline: Outline) -> None:
    tile = _plan(outline, 10, 512, "h200").graph("video_decoder_tile")
    assert sum(tile.flops.values()) / tile.runs == pytest.approx(9.66e12, rel=0.01)


def test_the_tables_of_a_step_have_their_published_size(outline: Outline) -> None:
    # 9.68 MB a timestep for the blocks, and 21,504 bytes for the head.
    assert _plan(outline, 10, 512).tables == 4 * (50 * 96_768 + 10_752) * 2
