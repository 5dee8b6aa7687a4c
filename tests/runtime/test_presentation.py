"""The rows that the text encoder reads against those that diffusers' text encoder steps make."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3FL2VATextEncoderStep,
    MiniMaxH3Ref2VATextEncoderStep,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from export.miniature.tokenizer import train
from runtime.geometry import conditioner_frames, image_grid, video_grid
from runtime.presentation import TEXT_ROWS_MAXIMUM, presentation
from runtime.refusal import RequestError
from runtime.selection import packed_order
from runtime.text import Tokenizer
from tests.request.sizes import RELEASED

PROMPT = "<Picture 1> dances to <Audio 2>  <d>Listen.</d>\n"


@dataclass(frozen=True)
class Item:
    """A reference as the presentation sees it, and as diffusers does."""

    kind: str
    frames: int
    vision_grid: tuple[int, int, int]
    audio_latents: int

    @property
    def has_audio(self):
        return self.audio_latents > 0


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The miniature's tokenizer, ours and transformers', and its own ids of the vision tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    files = train()
    for name, content in files.files().items():
        (directory / name).write_text(content, encoding="utf-8")
    file = directory / "tokenizer.json"
    names = {name: f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
    ids = {f"{name}_id": files.special_ids[token] for name, token in names.items()}
    return Tokenizer(file), Qwen2Tokenizer(tokenizer_file=str(file)), RELEASED.processor.model_copy(update=ids)


sides = st.tuples(st.integers(256, 1000), st.integers(256, 1000))
images = sides.map(lambda size: Item("image", 1, image_grid(*size, RELEASED.processor), 0))
videos = st.builds(
    lambda frames, size, sound: Item("video", frames, video_grid(frames, *size, RELEASED.processor), sound),
    st.integers(22, 362),
    sides,
    st.sampled_from([0, 0, 80, 207]),
)
sounds = st.integers(80, 600).map(lambda latents: Item("audio", 0, (0, 0, 0), latents))


@settings(max_examples=60, deadline=None)
@given(references=st.lists(st.one_of(images, videos, sounds), max_size=7))
def test_references_are_presented_as_in_diffusers(tokenizers, references):
    ours, theirs, processor = tokenizers
    found = presentation(PROMPT, references, ours, processor)
    shown = [item for item in references if item.kind == "video"]
    ids, tags = MiniMaxH3Ref2VATextEncoderStep._build_presentation(
        theirs,
        PROMPT,
        references,
        [item.vision_grid[1] * item.vision_grid[2] // 4 for item in references if item.kind == "image"],
        [item.vision_grid[1] * item.vision_grid[2] // 4 for item in shown],
        [conditioner_frames(item.frames, processor)[1] for item in shown],
    )
    assert found.token_ids.dtype == found.tags.dtype == np.int64
    assert found.token_ids.tolist() == ids
    assert found.tags.tolist() == tags


def seen(item, processor):
    """The frames in the patches of an item: an image twice, a video's last frame again where it has no partner."""
    if item.kind != "video":
        return [0, 0] if item.kind == "image" else []
    indices, _ = conditioner_frames(item.frames, processor)
    return indices + indices[-1:] * (len(indices) % 2)


@settings(max_examples=30, deadline=None)
@given(references=st.lists(st.one_of(images, videos, sounds), max_size=7))
def test_blocks_point_at_the_rows_that_pictures_take(tokenizers, references):
    ours, _, processor = tokenizers
    found = presentation(PROMPT, references, ours, processor)
    taken = np.isin(found.token_ids, (processor.image_pad_id, processor.video_pad_id))
    rows = [np.arange(block.first_row, block.first_row + block.rows) for block in found.vision]
    assert np.flatnonzero(taken).tolist() == [row for block in rows for row in block]
    for block in found.vision:
        item = references[block.reference]
        assert block.grid == (1, *item.vision_grid[1:])
        assert found.token_ids[block.first_row - 1] == processor.vision_start_id
        assert found.token_ids[block.first_row + block.rows] == processor.vision_end_id
    for place, item in enumerate(references):
        frames = [frame for block in found.vision if block.reference == place for frame in block.frames]
        assert frames == seen(item, processor)


class TextEncoder:
    """In the place of the conditioner: keeps the token ids that it is given."""

    config = SimpleNamespace(text_config=SimpleNamespace(num_hidden_layers=64))
    device, dtype = torch.device("cpu"), torch.float32

    def model(self, input_ids, **inputs):
        self.token_ids = input_ids[0].tolist()
        return SimpleNamespace(hidden_states=[torch.zeros(1)] * 51)


class Processor:
    """transformers' own image processor with the released limits, and what else diffusers asks of a processor."""

    def __init__(self, limits):
        size = {"shortest_edge": limits.image_min_pixels, "longest_edge": limits.image_max_pixels}
        self.image_processor = Qwen2VLImageProcessorPil(patch_size=16, size=size)

    def create_mm_token_type_ids(self, ids):
        return [[0] * len(row) for row in ids]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_keyframes_are_presented_as_in_diffusers(tokenizers, count):
    ours, theirs, processor = tokenizers
    pipeline, encoder = MiniMaxH3FL2VATextEncoderStep().init_pipeline(), TextEncoder()
    pipeline.update_components(text_encoder=encoder, tokenizer=theirs, processor=Processor(processor))
    keyframes = [Image.new("RGB", (352, 256))] * count
    tags = pipeline(prompt=PROMPT, keyframes=keyframes, output="text_token_tags")
    found = presentation(PROMPT, [Item("image", 1, image_grid(352, 256, processor), 0)] * count, ours, processor)
    assert found.token_ids.tolist() == encoder.token_ids
    assert found.tags.tolist() == tags.tolist()


def test_the_times_of_a_video_are_written_with_one_decimal_half_to_even(tokenizers):
    ours, theirs, processor = tokenizers
    found = presentation("a", [Item("video", 49, (3, 2, 2), 0)], ours, processor)
    text = theirs.decode(found.token_ids[found.tags == 1])
    assert text == "<Video 1>: <0.2 seconds><1.2 seconds><2.0 seconds>a"


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_a_prompt_with_the_token_of_a_picture_is_refused(tokenizers, token):
    ours, _, processor = tokenizers
    with pytest.raises(RequestError, match=r"prompt: .*must not contain <\|image_pad\|> or <\|video_pad\|>"):
        presentation(f"a {token}", [], ours, processor)


def test_rows_are_limited(tokenizers):
    ours, _, processor = tokenizers
    # One row of text; the block's own two ends and its label's count too.
    label = len(ours.encode("<Picture 1>: "))
    fitting = Item("image", 1, (1, 4, TEXT_ROWS_MAXIMUM - label - 3), 0)
    assert len(presentation("a", [fitting], ours, processor).token_ids) == TEXT_ROWS_MAXIMUM
    beyond = Item("image", 1, (1, 4, TEXT_ROWS_MAXIMUM - label - 2), 0)
    with pytest.raises(RequestError, match=f"references: got '131073 rows.*at most {TEXT_ROWS_MAXIMUM} rows"):
        presentation("a", [beyond], ours, processor)


def test_references_come_as_sent_or_by_type():
    kinds = ["audio", "video", "image", "audio", "video", "image"]
    assert packed_order(kinds, "as_sent") == [0, 1, 2, 3, 4, 5]
    assert packed_order(kinds, "by_type") == [2, 5, 1, 4, 0, 3]
