"""References of a request: what their files say of themselves, and every size that follows from it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from plugins.dimensions import FRAMES_PER_SECOND, Dimensions
from plugins.shape import latents
from runtime import geometry
from runtime.media.facts import Facts, ImageFacts, Kind, SoundFacts, VideoFacts
from runtime.reference_kinds import Role
from runtime.refusal import RequestError


@dataclass(frozen=True)
class KnownFile:
    """A file whose header has been read. `where` is how errors name it."""

    where: str
    sha256: str
    bytes: int
    start_time_seconds: float
    facts: Facts


@dataclass(frozen=True)
class Target:
    """What a reference is fitted to: the clip's sides and frames, and the short edges of ref2va's pictures."""

    width: int
    height: int
    frames: int
    image_edge: int
    video_edge: int


class Reference(BaseModel):
    """One reference with every size decided; those that a kind does not have are 0 or empty."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Kind
    role: Role = Field(description="which end of the clip a keyframe of fl2va is; a reference of ref2va")
    sha256: str = Field(description="of the file", pattern="^[0-9a-f]{64}$")
    bytes: int = Field(description="of the file", gt=0)
    start_time_seconds: float = Field(ge=0, allow_inf_nan=False)
    facts: Facts
    width: int = Field(description="pixels that the VAE sees")
    height: int
    frames: int = Field(description="at 24 a second, cut at the clip's length")
    encoded_frames: int = Field(description="frames that the VAE sees: 17n + 5, or 1 of an image")
    latent_frames: int
    latent_height: int
    latent_width: int
    audio_latents: int = Field(description="a channel")
    vision_grid: tuple[int, int, int] = Field(description="blocks, and patches down and across each")
    timestamps: tuple[float, ...] = Field(description="seconds, the label of each block of a video")

    def known(self, where: str) -> KnownFile:
        """What the reference was made of."""
        return KnownFile(where, self.sha256, self.bytes, self.start_time_seconds, self.facts)

    def video_rows(self, dimensions: Dimensions) -> int:
        """Packed rows of the picture."""
        frames, height, width = dimensions.denoiser.patch
        return (self.latent_frames // frames) * (self.latent_height // height) * (self.latent_width // width)


def sha256_of(data: bytes) -> str:
    """The digest that a reference is known by."""
    return hashlib.sha256(data).hexdigest()


def reference(file: KnownFile, role: Role, target: Target, dimensions: Dimensions) -> Reference:
    """Decides every size of a reference.

    Raises RequestError for what no size fits: a video or sound too short for one latent.
    """
    facts = file.facts
    if isinstance(facts, ImageFacts):
        sizes = _image(facts, role, target, dimensions)
    elif isinstance(facts, VideoFacts):
        sizes = _video(facts, file.where, target, dimensions)
    else:
        sizes = _Sizes(audio_latents=_audio_latents(facts, target, dimensions))
    return Reference(
        kind=facts.kind,
        role=role,
        sha256=file.sha256,
        bytes=file.bytes,
        start_time_seconds=file.start_time_seconds,
        facts=facts,
        width=sizes.width,
        height=sizes.height,
        frames=sizes.frames,
        encoded_frames=sizes.encoded_frames,
        latent_frames=latents(sizes.encoded_frames, dimensions.video_vae) if sizes.frames > 1 else sizes.frames,
        latent_height=sizes.height // dimensions.video_vae.spatial_ratio,
        latent_width=sizes.width // dimensions.video_vae.spatial_ratio,
        audio_latents=sizes.audio_latents,
        vision_grid=sizes.vision_grid,
        timestamps=sizes.timestamps,
    )


def condition_rows(references: Sequence[Reference], dimensions: Dimensions) -> tuple[int, int]:
    """Packed rows of all conditions: of pictures, and of both channels of sounds."""
    channels = 2
    pictures = sum(one.video_rows(dimensions) for one in references)
    return pictures, channels * sum(one.audio_latents for one in references)


@dataclass(frozen=True)
class _Sizes:
    width: int = 0
    height: int = 0
    frames: int = 0
    encoded_frames: int = 0
    audio_latents: int = 0
    vision_grid: tuple[int, int, int] = (0, 0, 0)
    timestamps: tuple[float, ...] = ()


def _image(facts: ImageFacts, role: Role, target: Target, dimensions: Dimensions) -> _Sizes:
    if role == "reference":
        width, height = geometry.image_size(facts.width, facts.height, target.image_edge)
    else:
        width, height = target.width, target.height
    grid = geometry.image_grid(width, height, dimensions.processor)
    return _Sizes(width, height, frames=1, encoded_frames=1, vision_grid=grid)


def _video(facts: VideoFacts, where: str, target: Target, dimensions: Dimensions) -> _Sizes:
    width, height = geometry.video_size(facts.width, facts.height, target.video_edge)
    frames = min(facts.frames, target.frames)
    try:
        encoded = geometry.video_frames(facts.frames, target.frames, dimensions.video_vae)
        _, timestamps = geometry.conditioner_frames(frames, dimensions.processor)
    except ValueError as error:
        raise RequestError(where, f"{facts.frames} frames", f"is too short: {error}") from None
    sound = _audio_latents(facts.sound, target, dimensions) if facts.sound is not None else 0
    grid = geometry.video_grid(frames, width, height, dimensions.processor)
    return _Sizes(width, height, frames, encoded, sound, grid, tuple(timestamps))


def _audio_latents(facts: SoundFacts, target: Target, dimensions: Dimensions) -> int:
    seconds = target.frames / FRAMES_PER_SECOND
    return geometry.sound_latents(facts.samples, facts.sample_rate, seconds, dimensions.audio_vae)
