"""The text encoder's graphs against transformers' Qwen3-VL."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import bound_keys, eager, element_types, load, relative
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from export.checkpoint import Checkpoint
from export.compare import compare
from export.emit import emit
from export.emitted import Emitted
from export.graphs import text_encoder
from export.graphs.graph import Graph
from export.passes.quantise_linears import quantise_linears
from export.passes.shard_rows import ShardError
from export.passes.shard_text_encoder import shard_text_encoder
from export.sidecar import plan_sidecar
from tests.rank_parts import of_rank

TOKENS = 23


@pytest.fixture(scope="module")
def reference(checkpoints: dict[str, Checkpoint]) -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(**checkpoints["diffusers"].config("text_encoder"))
    config._attn_implementation = "sdpa"
    return load(Qwen3VLForConditionalGeneration(config), checkpoints["diffusers"], "text_encoder")


@pytest.fixture(scope="module")
def graphs(checkpoints: dict[str, Checkpoint]) -> tuple[Graph, Graph]:
    embedding, layer = text_encoder.graphs(checkpoints["diffusers"], "fl2va", torch.float32)
    return embedding, layer


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def emitted(request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]) -> tuple[Emitted, Emitted]:
    embedding, layer = text_encoder.graphs(checkpoints["diffusers"], "fl2va", request.param)
    return emit(embedding), emit(layer)


def angles(reference: Qwen3VLForConditionalGeneration, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [L, head_dim] of positions [3, L], by transformers."""
    cos, sin = reference.model.language_model.rotary_emb(torch.empty(0), positions.unsqueeze(1))
    return cos[0], sin[0]


def test_fifty_layers_give_the_hidden_state_that_diffusers_reads(
    graphs: tuple[Graph, Graph], reference: Qwen3VLForConditionalGeneration
) -> None:
    embedding, layer = graphs
    assert len(layer.weights) == 50
    tokens = torch.randint(0, 255, (TOKENS,))
    expected = reference.model(tokens[None], output_hidden_states=True, use_cache=False).hidden_states[50][0]
    cos, sin = angles(reference, torch.arange(TOKENS).expand(3, -1))
    hidden = eager(embedding, tokens)
    for index in range(50):
        hidden = eager(layer, hidden, cos, sin, instance=index)
    # The order of float32 sums differs in 50 layers of attention and MLP.
    assert relative(hidden, expected) < 1e-5


def test_positions_that_differ_between_the_rotary_sections_need_no_other_graph(
    graphs: tuple[Graph, Graph], reference: Qwen3VLForConditionalGeneration
) -> None:
    positions = torch.stack([torch.arange(TOKENS), torch.arange(TOKENS) // 5, torch.arange(TOKENS) % 5])
    cos, sin = angles(reference, positions)
    hidden = torch.randn(TOKENS, len(reference.model.language_model.norm.weight))
    expected = reference.model.language_model.layers[7](hidden[None], position_embeddings=(cos[None], sin[None]))[0]
    assert relative(eager(graphs[1], hidden, cos, sin, instance=7), expected) < 1e-5


def test_a_row_does_not_see_later_rows(graphs: tuple[Graph, Graph], reference: Qwen3VLForConditionalGeneration) -> None:
    cos, sin = angles(reference, torch.arange(TOKENS).expand(3, -1))
    hidden = torch.randn(TOKENS, len(reference.model.language_model.norm.weight))
    changed = hidden.clone()
    changed[12:] += 1
    first, second = (eager(graphs[1], x, cos, sin) for x in (hidden, changed))
    assert torch.equal(first[:12], second[:12])
    assert (first[12:] - second[12:]).abs().min(dim=-1).values.gt(0).all()


def test_onnx_runtime_gives_what_torch_gives(emitted: tuple[Emitted, Emitted]) -> None:
    embedding, layer = emitted
    compare(embedding)
    for instance in (0, 49):
        compare(layer, instance)


def test_no_float64_is_inside(emitted: tuple[Emitted, Emitted]) -> None:
    for one in emitted:
        assert "DOUBLE" not in element_types(one.model)


def test_each_kept_layer_and_the_token_table_are_bound_once(
    emitted: tuple[Emitted, Emitted], checkpoints: dict[str, Checkpoint]
) -> None:
    embedding, layer = emitted
    number: Callable[[str], re.Match[str] | None] = re.compile(r"model\.language_model\.layers\.(\d+)\.").match
    stored = checkpoints["diffusers"].stored("text_encoder")
    kept = [key for key in stored if (found := number(key)) and int(found[1]) < 50]
    assert bound_keys(layer) == sorted(kept)
    assert bound_keys(embedding) == ["model.language_model.embed_tokens.weight"]


def test_weights_stay_in_the_checkpoint_dtype(emitted: tuple[Emitted, Emitted]) -> None:
    for one in emitted:
        assert {weight.dtype for weight in one.binding.inputs} == {torch.bfloat16}


def on_ranks(layer: Graph, ranks: int, hidden: torch.Tensor, *angles: torch.Tensor) -> torch.Tensor:
    """A layer, rank after rank, with the sums between its segments."""
    for graph, inputs in zip(shard_text_encoder(layer, ranks, segmented=True), (angles, ()), strict=True):
        hidden = hidden + sum(eager(of_rank(graph, rank), hidden, *inputs, instance=7) for rank in range(ranks))
    return hidden


@pytest.mark.parametrize("ranks", [2, 8])
def test_fp8_layers_are_divided_with_the_scales_of_the_whole(
    graphs: tuple[Graph, Graph], reference: Qwen3VLForConditionalGeneration, tmp_path: Path, ranks: int
) -> None:
    """Quantised once, for any number of ranks; only a rank's part of a row, as it comes, has a scale of its own."""
    layer = graphs[1]
    sidecar = plan_sidecar([layer], "fp8", tmp_path, "text_encoder")
    sidecar.write()
    quantised = quantise_linears(layer, sidecar)
    hidden = torch.randn(TOKENS, len(reference.model.language_model.norm.weight))
    rows = (hidden, *angles(reference, torch.arange(TOKENS).expand(3, -1)))
    assert relative(on_ranks(layer, ranks, *rows), eager(layer, *rows, instance=7)) < 1e-6
    whole = eager(quantised, *rows, instance=7)
    off, quantisation = (
        relative(on_ranks(quantised, ranks, *rows), whole),
        relative(whole, eager(layer, *rows, instance=7)),
    )
    assert 0 < off < quantisation


def test_ranks_that_do_not_divide_it_are_refused(graphs: tuple[Graph, Graph]) -> None:
    embedding, layer = graphs
    rule = "must divide its 16 query heads, 8 key and value heads, 64 inner channels; nearest legal: 8"
    with pytest.raises(ShardError, match=rf"graph text_encoder\.layer: ranks = 16: {rule}"):
        shard_text_encoder(layer, 16, segmented=True)
    with pytest.raises(ShardError, match=r"graph text_encoder\.embedding: ranks = 5: must divide its 64 columns"):
        shard_text_encoder(embedding, 5, segmented=False)
