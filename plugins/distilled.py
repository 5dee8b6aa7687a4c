"""What a distilled model, or an adapter, binds its requests to: a schedule, tasks, and the attention it learned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from plugins.video_tiles import TILE

Family = Literal["fasth3_v1", "fasth3_v2", "turbo", "flashgen", "merged"]
"""FastVideo's adapter and its 8-step model, LightX2V's and FlashGen's adapters; a checkpoint that pins its schedule."""

ArtifactTask = Literal["t2va", "fl2va", "ref2va"]


MOST_FORWARDS = 200
"""Of a request, whatever the model."""


def falls_to_zero(positions: Sequence[float]) -> bool:
    """Whether base positions, two or more, fall strictly from at most 1 to exactly 0."""
    falling = all(later < earlier for earlier, later in itertools.pairwise(positions))
    return len(positions) > 1 and falling and positions[0] <= 1 and positions[-1] == 0


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PinnedSchedule(_Frozen):
    """The only schedule that requests may have (spec/model.md 4.5).

    positions: base positions, strictly falling to 0, one more than there are forwards; None: equally spaced from 1, as
    the released model's are. The shifts are those of the sigmas of both clocks.
    """

    forwards: Annotated[int, Field(ge=1, le=MOST_FORWARDS)]
    positions: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    video_shift: Annotated[float, Field(gt=0)]
    audio_shift: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _check_positions(self) -> PinnedSchedule:
        positions = self.positions
        if positions is None:
            return self
        if len(positions) != self.forwards + 1:
            raise ValueError(f"{len(positions)} positions for {self.forwards} forwards; must be one more")
        if not falls_to_zero(positions):
            raise ValueError(f"positions {list(positions)}: must fall strictly from at most 1 to exactly 0")
        return self


class VideoSparse(_Frozen):
    """Attention of video tiles to the most relevant video tiles alone (spec/model.md 8.3).

    tile: rows of a tile, of which there is one number. sparsity: the share of video tiles that are left out; it was
    trained with.
    """

    tile: Annotated[int, Field(ge=TILE, le=TILE)] = TILE
    sparsity: Annotated[float, Field(ge=0, lt=1)]


class Distilled(_Frozen):
    """One artifact. `name` is what requests call it; sha256 is that of its file, None where it has several.

    video_sparse: what its attention is; None: as the released model's.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    family: Family
    tasks: Annotated[tuple[ArtifactTask, ...], Field(min_length=1, strict=False)]
    schedule: PinnedSchedule
    video_sparse: VideoSparse | None = None
    sha256: str | None = None
