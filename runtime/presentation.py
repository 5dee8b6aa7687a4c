"""What the text encoder reads: a label and pictures for every reference, then the prompt (spec/model.md 7.2).

No chat template, nothing before or after. Sounds are only named: the text encoder never hears them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plugins.dimensions import TEXT_TAG, VIDEO_TAG, Processor
from runtime.contract import PROMPT
from runtime.geometry import Grid, conditioner_frames, frame_groups, vision_tokens
from runtime.media.facts import Kind
from runtime.refusal import RequestError
from runtime.text import Tokenizer

TEXT_ROWS_MAXIMUM = 131_072
"""Rows that the text encoder and the denoiser are built for, pictures included."""


class Shown(Protocol):
    """What the presentation asks of a keyframe or reference."""

    @property
    def kind(self) -> Kind:
        """What it is."""

    @property
    def frames(self) -> int:
        """Frames of a video at 24 a second, cut at the clip's length."""

    @property
    def vision_grid(self) -> Grid:
        """Groups of frames, rows and columns of patches of an image or video."""

    @property
    def audio_latents(self) -> int:
        """Latents of one channel of its sound, 0 where there is none."""


@dataclass(frozen=True)
class VisionBlock:
    """Rows that show one picture: an image, or a group of a video's frames.

    reference: its place among the references. first_row, rows: the rows that take the vision tower's output, between
    the tokens that open and close the block. grid: patches (1, rows, columns). frames: what the patches hold, as
    indices of the reference's frames at 24 a second; an image is repeated.
    """

    reference: int
    first_row: int
    rows: int
    grid: Grid
    frames: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Presentation:
    """Input of the text encoder: token_ids int64 [L], tags int64 [L] (0 in a vision block, 1 elsewhere), and blocks."""

    token_ids: NDArray[np.int64]
    tags: NDArray[np.int64]
    vision: tuple[VisionBlock, ...]


def presentation(prompt: str, references: Sequence[Shown], tokenizer: Tokenizer, processor: Processor) -> Presentation:
    """The presentation of a prompt after its keyframes or references, which come in packed order; there may be none.

    Token for token that of diffusers' text encoder steps. Raises RequestError when the prompt has no token, too
    many, or one that stands for a picture, or when all rows together exceed TEXT_ROWS_MAXIMUM.
    """
    rows = _Rows(tokenizer, processor)
    for index, reference in enumerate(references):
        # The sound of a video is named before it, as its rows are packed before the video's.
        if reference.audio_latents:
            rows.label("Audio")
        if reference.kind == "image":
            rows.label("Picture")
            rows.picture(index, reference.vision_grid, (0,) * processor.temporal_patch, processor.image_pad_id)
        elif reference.kind == "video":
            rows.label("Video")
            rows.video(index, reference)
    rows.prompt(prompt)
    return rows.finish()


class _Rows:
    """Collects rows; labels are numbered for each of their kinds from 1."""

    def __init__(self, tokenizer: Tokenizer, processor: Processor) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._labels: dict[str, int] = {}
        self._ids: list[NDArray[np.int64]] = []
        self._tags: list[NDArray[np.int64]] = []
        self._blocks: list[VisionBlock] = []
        self._count = 0

    def label(self, name: str) -> None:
        self._labels[name] = self._labels.get(name, 0) + 1
        self.text(f"<{name} {self._labels[name]}>: ")

    def text(self, text: str) -> None:
        self._append(self._tokenizer.encode(text), TEXT_TAG)

    def prompt(self, prompt: str) -> None:
        ids = self._tokenizer.encode(prompt)
        if np.isin(ids, (self._processor.image_pad_id, self._processor.video_pad_id)).any():
            rule = "must not contain <|image_pad|> or <|video_pad|>, the tokens that pictures take the place of"
            raise RequestError(PROMPT.name, prompt, rule)
        self._append(ids, TEXT_TAG)

    def video(self, index: int, reference: Shown) -> None:
        frames, times = conditioner_frames(reference.frames, self._processor)
        for group, time in zip(frame_groups(frames, self._processor), times, strict=True):
            # One decimal rounds half to even: the first group, at 0.25 seconds, is at "0.2 seconds".
            self.text(f"<{time:.1f} seconds>")
            self.picture(index, reference.vision_grid, group, self._processor.video_pad_id)

    def picture(self, index: int, grid: Grid, frames: tuple[int, ...], pad: int) -> None:
        rows = vision_tokens(grid, self._processor)
        self._blocks.append(VisionBlock(index, self._count + 1, rows, (1, *grid[1:]), frames))
        ends = self._processor.vision_start_id, self._processor.vision_end_id
        self._append(np.array([ends[0], *[pad] * rows, ends[1]], dtype=np.int64), VIDEO_TAG)

    def finish(self) -> Presentation:
        if self._count > TEXT_ROWS_MAXIMUM:
            rule = f"must take at most {TEXT_ROWS_MAXIMUM} rows with the prompt: fewer of them, or a smaller short edge"
            raise RequestError("references", f"{self._count} rows of the text encoder", rule)
        return Presentation(np.concatenate(self._ids), np.concatenate(self._tags), tuple(self._blocks))

    def _append(self, ids: NDArray[np.int64], tag: int) -> None:
        self._ids.append(ids)
        self._tags.append(np.full(len(ids), tag, dtype=np.int64))
        self._count += len(ids)
