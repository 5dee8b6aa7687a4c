"""The plans' arithmetic against the published sizes of the model (spec/model.md, spec/contract.md 2.5)."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from torch.utils.flop_counter import FlopCounterMode

from engines.plan import Plan, Workload, make_plan
from engines.plan.conditions import tile_products
from engines.plan.weights import graph_weights
from engines.profile import Profile
from export.checkpoint.components.video_vae import VideoVAEConfig
from export.checkpoint.outline import Outline


def _plan(outline: Outline, seconds: float, text_rows: int, profile: str = "b300") -> Plan:
    return make_plan(Profile.load(profile), outline, Workload(seconds=seconds, text_rows=text_rows, forwards=1))


def test_the_denoiser_has_the_published_bytes_and_parameters(outline: Outline) -> None:
    assert outline.stored_bytes("denoiser") == 66_280_430_144
    assert sum(math.prod(d.shape or ()) for d in outline.parameters["denoiser"].values()) == 33_122_992_896


def test_the_projections_that_leave_the_loop_are_13_billion_parameters(outline: Outline) -> None:
    adaln = graph_weights(outline)["modulation.adaln"]
    assert sum(math.prod(d.shape or ()) for one in adaln.instances for d in one.values()) == 13_039_369_728


def test_what_estimates_count_for_a_row_is_what_the_graphs_multiply_it_with(outline: Outline) -> None:
    weights, sizes = graph_weights(outline), outline.dimensions
    assert sizes.denoiser.block_products == weights["block"].products()
    assert sizes.text_encoder.layer_products == weights["text_encoder.layer"].products()


def test_the_encoder_that_is_used_has_its_published_size(outline: Outline) -> None:
    # 51.5 GB, with the vision tower and all of its mergers.
    weights = graph_weights(outline)
    encoders = [graph for name, graph in weights.items() if name.startswith(("text_encoder.", "vision_encoder."))]
    assert sum(sum(graph.nbytes("bfloat16")) for graph in encoders) == pytest.approx(51.5e9, abs=0.05e9)


def test_every_encoder_of_references_has_its_published_parameters(outline: Outline) -> None:
    weights = graph_weights(outline)
    sizes = {name: sum(weights[name].nbytes("float32")) // 4 for name in ("video_encoder_tile", "audio_encoder")}
    # 180,335,536 of the encoder and 48 x 48 + 48 of the pointwise convolution after it (spec/model.md 1e).
    assert sizes["video_encoder_tile"] == 180_335_536 + 48 * 48 + 48
    # 151,321,489 parameters and zero biases of keys, less the decoder's and the deviation's (spec/model.md 1f).
    decoder = sum(weights["audio_decoder"].nbytes("float32")) // 4
    filters = sum(math.prod(d.shape or ()) for n, d in outline.parameters["audio_vae"].items() if "filter" in n)
    assert sizes["audio_encoder"] == 151_321_489 - (decoder - filters) - (32 * 32 + 32) + 2048


def test_references_bring_their_rows_and_their_encoders_runs(outline: Outline) -> None:
    """Sizes of spec/contract.md 1.6 and spec/model.md 3.5, 6.4 and 7.2."""
    workload = Workload(seconds=5, images=1, videos=1, sounds=1, forwards=1)
    bare = make_plan(Profile.load("b300"), outline, workload.model_copy(update={"images": 0, "videos": 0, "sounds": 0}))
    plan = make_plan(Profile.load("b300"), outline, workload)
    # A 16:9 image is 3648x2048: 114 x 64 rows of the model, and as many of the language model.
    # A video of 5 s is cut to 107 frames, 32 latent frames of 24 x 42 rows; the language model sees five pairs.
    assert plan.rows.video - bare.rows.video == 114 * 64 + 32 * 24 * 42
    assert plan.rows.text - bare.rows.text == 114 * 64 + 5 * 24 * 42
    # 5 s of the sound and of the video's own, 200 latents for each of two channels.
    assert plan.rows.audio - bare.rows.audio == 2 * 2 * 200
    assert plan.graph("vision_encoder.block").runs == 27 * (1 + 5)
    # 11 x 19 tiles of the image, 7 clips of 4 x 7 tiles, all on the first GPU.
    assert plan.graph("video_encoder_tile").runs == 209 + 7 * 28
    assert plan.graph("audio_encoder").runs == 2
    assert {bare.graph(graph).runs for graph in ("vision_encoder.merger", "video_encoder_tile", "audio_encoder")} == {0}
    assert bare.stage("encode_video").flops == 0 < plan.stage("encode_video").flops


def test_an_encoder_tile_takes_the_operations_that_torch_counts(outline: Outline) -> None:
    config = outline.configs["video_vae"]
    assert isinstance(config, VideoVAEConfig)
    with torch.device("meta"):
        encoder = AutoencoderKLMiniMaxH3(**config.model_dump()).encoder
    for frames in (1, 17):
        with FlopCounterMode(display=False) as counter:
            encoder(torch.empty(1, 3, frames, 256, 256, device="meta"))
        assert counter.get_total_flops() == 2 * tile_products(config, frames, 256)


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
