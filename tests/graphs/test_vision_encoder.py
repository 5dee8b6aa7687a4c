"""The vision encoder's graphs against transformers' Qwen3-VL."""

from __future__ import annotations

import pytest
import torch
from running import bound_keys, eager, element_types, load, relative
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from export.checkpoint import Checkpoint
from export.compare import compare
from export.emit import emit
from export.emitted import Emitted
from export.graphs import vision_encoder
from export.graphs.graph import Graph

GRID = (1, 6, 10)
"""Patches of one picture: time, height, width."""


@pytest.fixture(scope="module")
def reference(checkpoints: dict[str, Checkpoint]) -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(**checkpoints["diffusers"].config("text_encoder"))
    config._attn_implementation = "sdpa"
    return load(Qwen3VLForConditionalGeneration(config), checkpoints["diffusers"], "text_encoder")


@pytest.fixture(params=["native", "diffusers"])
def graphs(request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]) -> dict[str, Graph]:
    made = vision_encoder.graphs(checkpoints[request.param], "fl2va", torch.float32)
    return {graph.name.removeprefix("vision_encoder."): graph for graph in made}


@pytest.fixture(scope="module")
def emitted(checkpoints: dict[str, Checkpoint]) -> tuple[Emitted, ...]:
    """In bfloat16; the graphs of float32 are compared in every build for a CPU."""
    return tuple(emit(g) for g in vision_encoder.graphs(checkpoints["diffusers"], "fl2va", torch.bfloat16))


def test_a_picture_becomes_the_rows_and_the_deepstack_rows_of_transformers(
    graphs: dict[str, Graph], reference: Qwen3VLForConditionalGeneration
) -> None:
    visual, grid = reference.model.visual, torch.tensor([GRID])
    patches = torch.randn(GRID[1] * GRID[2], 3 * 2 * 16 * 16)
    expected = visual(patches, grid)
    taps = visual.config.deepstack_visual_indexes

    indices, weights = get_vision_interpolation_indices_and_weights(
        grid, visual.num_grid_per_side, align_corners=True, spatial_merge_size=2
    )
    cos, sin = visual.rotary_pos_emb(patches, get_vision_position_ids(grid, 2))
    hidden = eager(graphs["embed"], patches, indices.T.contiguous(), weights.T.contiguous())
    deepstack = []
    for index in range(len(graphs["block"].weights)):
        hidden = eager(graphs["block"], hidden, cos, sin, instance=index)
        if index in taps:
            deepstack.append(eager(graphs["deepstack"], hidden, instance=taps.index(index)))

    # The order of float32 sums differs.
    assert relative(hidden, expected.last_hidden_state) < 1e-5
    assert relative(eager(graphs["merger"], hidden), expected.pooler_output) < 1e-5
    for found, wanted in zip(deepstack, expected.deepstack_features, strict=True):
        assert relative(found, wanted) < 1e-5


def test_every_patch_sees_every_other(graphs: dict[str, Graph]) -> None:
    hidden, angles = torch.randn(12, 32), torch.randn(12, 16)
    changed = hidden.clone()
    changed[5] += 1
    first, second = (eager(graphs["block"], x, angles.cos(), angles.sin()) for x in (hidden, changed))
    assert (first - second).abs().amax(dim=-1).gt(0).all()


def test_onnx_runtime_gives_what_torch_gives(emitted: tuple[Emitted, ...]) -> None:
    for one in emitted:
        compare(one, len(one.graph.weights) - 1)


def test_no_float64_is_inside_and_one_attention_is_a_block_s(emitted: tuple[Emitted, ...]) -> None:
    for one in emitted:
        assert "DOUBLE" not in element_types(one.model)
        assert one.census.get("h3::Attention", 0) == (one.graph.name == "vision_encoder.block")


def test_the_whole_tower_is_bound_once_in_the_checkpoint_dtype(
    emitted: tuple[Emitted, ...], checkpoints: dict[str, Checkpoint]
) -> None:
    stored = checkpoints["diffusers"].stored("text_encoder")
    found = sorted(key for one in emitted for key in bound_keys(one))
    assert found == sorted(key for key in stored if key.startswith("model.visual."))
    assert {weight.dtype for one in emitted for weight in one.binding.inputs} == {torch.bfloat16}
