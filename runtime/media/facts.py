"""What a file holds, as far as its headers and packet tables tell; travels as JSON with a resolved request."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["image", "video", "audio"]

_POSITIVE = Field(gt=0)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class ImageFacts(_Frozen):
    """A still. width, height: pixels after the orientation that the file asks for."""

    kind: Literal["image"] = "image"
    width: Annotated[int, _POSITIVE]
    height: Annotated[int, _POSITIVE]


class SoundFacts(_Frozen):
    """A sound, or the soundtrack of a video from its start time on.

    sample_rate: Hz. samples: what decoding yields of each channel, without the encoder's priming.
    """

    kind: Literal["audio"] = "audio"
    sample_rate: Annotated[int, _POSITIVE]
    channels: Annotated[int, Field(ge=1, le=2)]
    samples: Annotated[int, _POSITIVE]

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.samples / self.sample_rate


class VideoFacts(_Frozen):
    """A video from its start time on.

    width, height: pixels as shown, with rotation and sample aspect ratio applied. frames: on the 24 a second grid, each
    source frame held until the next one's time. seconds: until the end of the last frame. sound: its soundtrack.
    """

    kind: Literal["video"] = "video"
    width: Annotated[int, _POSITIVE]
    height: Annotated[int, _POSITIVE]
    frames: Annotated[int, _POSITIVE]
    seconds: Annotated[float, _POSITIVE]
    sound: SoundFacts | None = None


Facts = Annotated[ImageFacts | VideoFacts | SoundFacts, Field(discriminator="kind")]
"""What `probe` returns; for pydantic models, told apart by `kind`."""
