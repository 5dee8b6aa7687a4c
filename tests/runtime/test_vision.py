"""Pictures in the text encoder, against transformers' Qwen3-VL on the miniature."""

from __future__ import annotations

import pytest
import torch
from eager_vision import EagerEncoder
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from export.checkpoint import Checkpoint, materialise
from export.miniature import write_miniature
from plugins.dimensions import Dimensions
from runtime.encoder import Placed, TextEncoder, mrope_positions
from runtime.events import Cancellation, Cancelled, Event, Reporter, Units
from runtime.vision import Picture, VisionEncoder, position_interpolation, vision_rotary

Grid = tuple[int, int]
Kinds = tuple[tuple[int, int, Grid], ...]
"""References by type, blocks and grid of patches."""

IMAGE, VIDEO = 1, 2
"""Token types of transformers' get_rope_index."""

PROMPTS: dict[str, Kinds] = {
    "one image": ((IMAGE, 1, (4, 6)),),
    "two images of different sizes": ((IMAGE, 1, (4, 6)), (IMAGE, 1, (10, 4))),
    "a video": ((VIDEO, 3, (4, 8)),),
    "a mix": ((IMAGE, 1, (6, 4)), (VIDEO, 2, (4, 4)), (IMAGE, 1, (2, 8)), (VIDEO, 1, (6, 6))),
}

even = st.integers(1, 40).map(lambda half: 2 * half)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("vision") / "miniature"
    write_miniature(root, "diffusers", seed=5)
    return Checkpoint.open(root)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(**checkpoint.config("text_encoder"))
    config._attn_implementation = "sdpa"
    model = Qwen3VLForConditionalGeneration(config)
    model.load_state_dict({n: materialise(w).float() for n, w in checkpoint.parameters("text_encoder").items()})
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def dimensions(checkpoint: Checkpoint) -> Dimensions:
    return checkpoint.dimensions


def units(total: int = 1000, events: list[Event] | None = None, cancellation: Cancellation | None = None) -> Units:
    sink = (lambda event: None) if events is None else events.append
    return Units("encode", total, Reporter(sink, lambda: 0.0), cancellation or Cancellation())


@pytest.fixture(scope="module")
def sizes() -> Dimensions:
    """Of a released model: its grid of 48 learned positions a side, and heads of 72."""
    from tests.request.sizes import RELEASED

    return RELEASED


@given(rows=even, columns=even)
def test_learned_positions_are_resampled_as_transformers_does(rows: int, columns: int, sizes: Dimensions) -> None:
    indices, weights = position_interpolation((rows, columns), sizes.vision)
    expected = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, rows, columns]]), sizes.vision.position_grid, align_corners=True, spatial_merge_size=2
    )
    assert torch.equal(indices, expected[0].T)
    assert torch.equal(weights, expected[1].T)


@given(rows=even, columns=even)
def test_rotary_tables_are_those_of_transformers(
    rows: int, columns: int, model: Qwen3VLForConditionalGeneration, dimensions: Dimensions
) -> None:
    places = get_vision_position_ids(torch.tensor([[1, rows, columns]]), 2)
    expected = model.model.visual.rotary_pos_emb(torch.empty(0), places)
    for ours, theirs in zip(vision_rotary((rows, columns), dimensions.vision), expected, strict=True):
        assert torch.equal(ours, theirs)


def prompt(kinds: Kinds, dimensions: Dimensions) -> tuple[torch.Tensor, list[int], list[Grid]]:
    """Token ids with a vision block for each picture, first rows of the pictures, and their grids."""
    ids, starts, grids = [7, 8, 9], [], []
    pads = {IMAGE: dimensions.processor.image_pad_id, VIDEO: dimensions.processor.video_pad_id}
    for kind, blocks, grid in kinds:
        for block in range(blocks):
            ids += [11 + block, dimensions.processor.vision_start_id]
            starts.append(len(ids))
            grids.append(grid)
            ids += [pads[kind]] * (grid[0] * grid[1] // 4) + [dimensions.processor.vision_end_id]
    return torch.tensor([*ids, 21, 22, 23, 24]), starts, grids


def inputs_of_transformers(
    kinds: Kinds, ids: torch.Tensor, patches: list[torch.Tensor], dimensions: Dimensions
) -> dict[str, torch.Tensor]:
    types = (ids == dimensions.processor.image_pad_id).int() + 2 * (ids == dimensions.processor.video_pad_id).int()
    found: dict[str, torch.Tensor] = {"input_ids": ids[None], "mm_token_type_ids": types[None]}
    rest = iter(patches)
    batches: dict[int, list[torch.Tensor]] = {IMAGE: [], VIDEO: []}
    for kind, blocks, _ in kinds:
        batches[kind] += [next(rest) for _ in range(blocks)]
    for kind, values, grid in (
        (IMAGE, "pixel_values", "image_grid_thw"),
        (VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        if batches[kind]:
            found[values] = torch.cat(batches[kind])
            found[grid] = torch.tensor([[blocks, *size] for one, blocks, size in kinds if one == kind])
    return found


@pytest.mark.parametrize("kinds", PROMPTS.values(), ids=PROMPTS.keys())
def test_the_text_encoder_sees_pictures_as_transformers_does(
    kinds: Kinds, model: Qwen3VLForConditionalGeneration, dimensions: Dimensions
) -> None:
    ids, starts, grids = prompt(kinds, dimensions)
    generator = torch.Generator().manual_seed(3)
    patches = [torch.randn(rows * columns, 1536, generator=generator) for rows, columns in grids]
    engines = EagerEncoder(model, dimensions)
    events: list[Event] = []
    count = units(len(grids) + 50, events)
    vision = VisionEncoder(engines)  # type: ignore[arg-type]
    placed = [Placed(vision.encode(p, g, count), s) for p, g, s in zip(patches, grids, starts, strict=True)]
    found = TextEncoder(engines).encode(ids, placed, count)  # type: ignore[arg-type]
    theirs = inputs_of_transformers(kinds, ids, patches, dimensions)
    expected = model.model(**theirs, output_hidden_states=True, use_cache=False).hidden_states[50][0]
    # The same modules, but attention over rows that another kernel masks: float32 sums in another order, 50 layers.
    assert ((found - expected).abs().max() / expected.abs().max()) < 1e-5
    assert [event.index for event in events] == list(range(len(grids) + 51))
    with torch.no_grad():
        blind = TextEncoder(engines).encode(ids, [], units())  # type: ignore[arg-type]
    assert (blind - expected).abs().max() / expected.abs().max() > 1e-2, "the pictures are seen"


@given(kinds=st.lists(st.tuples(st.sampled_from([IMAGE, VIDEO]), st.integers(1, 4), st.tuples(even, even)), max_size=4))
def test_positions_of_pictures_are_those_of_get_rope_index(
    kinds: list[tuple[int, int, Grid]], model: Qwen3VLForConditionalGeneration, dimensions: Dimensions
) -> None:
    kinds = [(kind, 1 if kind == IMAGE else blocks, grid) for kind, blocks, grid in kinds]
    ids, starts, grids = prompt(tuple(kinds), dimensions)
    placed = [
        Placed(Picture(grid, torch.empty(grid[0] * grid[1] // 4, 1), ()), start)
        for grid, start in zip(grids, starts, strict=True)
    ]
    found = mrope_positions(len(ids), placed, 2)
    if not kinds:
        assert torch.equal(found, torch.arange(len(ids)).expand(3, -1))
        return
    empty = [torch.empty(0, 1)] * len(grids)
    theirs = inputs_of_transformers(tuple(kinds), ids, empty, dimensions)
    arguments = {k: v for k, v in theirs.items() if not k.startswith("pixel")}
    assert torch.equal(found, model.model.get_rope_index(**arguments)[0][:, 0])


def test_a_cancelled_request_does_not_look_further(
    model: Qwen3VLForConditionalGeneration, dimensions: Dimensions
) -> None:
    cancellation, ran = Cancellation(), []
    engines = EagerEncoder(model, dimensions)
    run = engines.run

    def note(graph: str, inputs: dict[str, torch.Tensor], instance: int = 0) -> dict[str, torch.Tensor]:
        ran.append((graph, instance))
        if instance == 1:
            cancellation.cancel()
        return run(graph, inputs, instance)

    engines.run = note  # type: ignore[method-assign]
    with pytest.raises(Cancelled, match="vision encoder block 3 of 4"):
        VisionEncoder(engines).encode(torch.zeros(4, 1536), (2, 2), units(cancellation=cancellation))  # type: ignore[arg-type]
    assert [instance for graph, instance in ran if graph == "vision_encoder.block"] == [0, 1]
