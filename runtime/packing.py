"""The packed sequence of a request: which row holds what, where it lies in space and time, and which timestep it has.

A layout is a list of segments in packed order: text, then what keyframes and references condition on, then the target's
audio and video. Text-to-video-and-audio has no conditions; nothing else sets the three tasks apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from plugins.dimensions import AUDIO_CHANNELS, AUDIO_TAG, MODALITIES, VIDEO_TAG
from plugins.schedule import AUDIO_CONDITION_SLOT, AUDIO_SLOT, VIDEO_SLOT, VISUAL_CONDITION_SLOT
from plugins.video_tiles import Grid
from runtime.media.facts import Kind
from runtime.reference_kinds import Role

Stream = Literal["text", "audio", "video"]
"""Inputs of the prologue, in the order in which it concatenates them."""

STREAMS: tuple[Stream, ...] = ("text", "audio", "video")

FRAMES_PER_LATENT = (1, 4, 4, 4, 4)
"""Pixel frames that successive video latent frames span, repeating."""

CLOCK_UNITS_PER_FRAME = 5.0 / 3.0
"""The rotary clock ticks once an audio latent: 40 Hz against 24 frames a second."""

SPATIAL_SCALE = 32

Patch = tuple[int, int, int]

IMAGE_CLOCK_UNITS = 1.0
"""Time that a reference image takes on the rotary clock, which is not that of a frame."""


@dataclass(frozen=True)
class Condition:
    """A keyframe or reference as the layout needs it.

    kind: what it shows or sounds. role: keyframes lie in the clip's time, references before it. latent_frames,
    latent_height and latent_width: of its picture, 1 frame for an image, 0 for a sound. audio_latents: of one channel
    of its sound, 0 where there is none.
    """

    kind: Kind
    role: Role
    latent_frames: int = 0
    latent_height: int = 0
    latent_width: int = 0
    audio_latents: int = 0


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive packed rows of one kind.

    stream: which prologue input holds the rows, in the order in which its segments appear. tags: int64 [rows],
    modalities, pick the AdaLN weights. slot: timestep slot. positions: float64 [rows, 3], columns t, h, w. target: rows
    that are generated. grid: of a picture, whose rows go along its columns, then its rows, then its frames.
    """

    stream: Stream
    tags: NDArray[np.int64]
    slot: int
    positions: NDArray[np.float64]
    target: bool = False
    grid: Grid = (0, 0, 0)

    @property
    def rows(self) -> int:
        """Packed rows of the segment."""
        return len(self.positions)


@dataclass(frozen=True, eq=False)
class Layout:
    """Everything that the graphs and the sampler need to know about rows; all index tensors are int64 on the CPU.

    token_tags [S]; position_ids float64 [S, 3]; row_order [S], index of each packed row into cat(text, audio, video);
    timestep_index [S], slot of each row; modulation_index [S] = slot * 3 + tag; text_, audio_ and video_indices:
    packed rows of each stream in stream order, conditions before targets; target_audio and target_video: the
    generated rows, a slice of the packed sequence each; condition_audio and condition_video: how many rows of each
    stream are conditions; target_grid: of the generated video.
    """

    token_tags: torch.Tensor
    position_ids: torch.Tensor
    row_order: torch.Tensor
    timestep_index: torch.Tensor
    modulation_index: torch.Tensor
    text_indices: torch.Tensor
    audio_indices: torch.Tensor
    video_indices: torch.Tensor
    target_audio: slice
    target_video: slice
    condition_audio: int
    condition_video: int
    target_grid: Grid

    @property
    def rows(self) -> int:
        """Packed rows S."""
        return self.token_tags.numel()


def layout(
    text_tags: torch.Tensor,
    conditions: Sequence[Condition],
    latent_frames: int,
    latent_height: int,
    latent_width: int,
    audio_latents: int,
    patch: Patch = (1, 2, 2),
) -> Layout:
    """The layout of a request of any task: text, conditions in packed order, audio of both channels, video.

    text_tags: int64 [L], the modality of every text row, which is that of video in a vision block. Rows, tags and
    positions are bit-equal to diffusers' MiniMaxH3PrepareLayoutStep and MiniMaxH3Ref2VAPrepareLayoutStep
    (spec/model.md 3.2 and 3.3).
    """
    width_axis = spatial_axis(latent_width, latent_height, patch[2])
    segments = [Segment("text", text_tags.numpy(), VIDEO_SLOT, _text_positions(len(text_tags)))]
    # Rotary time goes on from the text: each reference takes its share of it, then the clip begins.
    clock = float(len(text_tags))
    for condition in conditions:
        origin = _last_frame(clock, latent_frames) if condition.role == "last" else clock
        segments += _condition_segments(condition, origin, width_axis, patch)
        clock += _clock_units(condition)
    picture = video_positions(clock, latent_frames, latent_height, latent_width, patch)
    segments.append(_audio(AUDIO_SLOT, audio_positions(clock, audio_latents, width_axis), target=True))
    pt, ph, pw = patch
    grid = latent_frames // pt, latent_height // ph, latent_width // pw
    segments.append(_video(VIDEO_SLOT, picture, target=True, grid=grid))
    return assemble(segments)


def assemble(segments: Sequence[Segment]) -> Layout:
    """The layout of segments in packed order; exactly one audio and one video segment must be a target."""
    order, indices = _row_order(segments)
    tags = np.concatenate([segment.tags for segment in segments])
    slots = np.concatenate([np.full(segment.rows, segment.slot) for segment in segments])
    return Layout(
        token_tags=_int64(tags),
        position_ids=torch.from_numpy(np.concatenate([segment.positions for segment in segments])),
        row_order=_int64(order),
        timestep_index=_int64(slots),
        modulation_index=_int64(slots * MODALITIES + tags),
        text_indices=_int64(indices["text"]),
        audio_indices=_int64(indices["audio"]),
        video_indices=_int64(indices["video"]),
        target_audio=_target(segments, "audio"),
        target_video=_target(segments, "video"),
        condition_audio=_condition_rows(segments, "audio"),
        condition_video=_condition_rows(segments, "video"),
        target_grid=next(segment.grid for segment in segments if segment.target and segment.stream == "video"),
    )


def spatial_axis(cells: int, other_cells: int, patch: int) -> NDArray[np.float64]:
    """Rotary coordinates along one side of a latent grid, float64 [cells / patch].

    Centred, in units of the square root of the area times 32, the right end excluded.
    """
    ratio = cells / np.sqrt(cells * other_cells)
    left = (1.0 - ratio) / 2.0
    # numpy's linspace (start + k * (stop - start) / n) is the definition; torch's rounds otherwise.
    axis: NDArray[np.float64] = np.linspace(left, left + ratio, cells // patch, endpoint=False) * SPATIAL_SCALE
    return axis


def temporal_axis(origin: float, latent_frames: int) -> NDArray[np.float64]:
    """Rotary times of video latent frames from `origin`, float64 [latent_frames]; steps of 5/3 * (1, 4, 4, 4, 4)."""
    return origin + np.concatenate([np.zeros(1), np.cumsum(_spans(latent_frames)[:-1])])


def video_positions(
    origin: float, latent_frames: int, latent_height: int, latent_width: int, patch: Patch
) -> NDArray[np.float64]:
    """Positions of a video's rows, frame-major then row-major, float64 [T * h/2 * w/2, 3]."""
    axes = (
        temporal_axis(origin, latent_frames),
        spatial_axis(latent_height, latent_width, patch[1]),
        spatial_axis(latent_width, latent_height, patch[2]),
    )
    return np.stack([grid.reshape(-1) for grid in np.meshgrid(*axes, indexing="ij")], axis=-1)


def audio_positions(origin: float, audio_latents: int, width_axis: NDArray[np.float64]) -> NDArray[np.float64]:
    """Positions of a stereo soundtrack's rows, left channel then right, float64 [2A, 3].

    The channels sit at the two ends of the width axis of the picture that they belong to, at height 0.
    """
    positions = np.zeros((AUDIO_CHANNELS * audio_latents, 3))
    positions[:, 0] = np.tile(origin + np.arange(audio_latents, dtype=np.float64), AUDIO_CHANNELS)
    positions[:, 2] = np.repeat([width_axis[0], width_axis[-1]], audio_latents)
    return positions


def rotary_tables(position_ids: torch.Tensor, frequencies: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the rotary angles, float32 [S, 3 * frequencies] each, columns t | h | w.

    position_ids: float64 [S, 3]. One vector of frequencies theta^(-j / frequencies) serves the three axes.
    Positions are rounded to float32 before they are multiplied (spec/model.md 2.2), as in diffusers'
    MiniMaxH3RotaryPosEmbed, whose tables repeat these columns twice.
    """
    exponents = torch.arange(0, 2 * frequencies, 2, dtype=torch.float32) / (2 * frequencies)
    inverse = 1.0 / (theta**exponents)
    angles = (position_ids.to(torch.float32).unsqueeze(-1) * inverse).flatten(1)
    return angles.cos(), angles.sin()


def patchify_video(latents: torch.Tensor, patch: Patch = (1, 2, 2)) -> torch.Tensor:
    """Video latents [1, C, T, h, w] as rows [T * h/2 * w/2, C * 4]: frame-major, then row-major; column c*4 + y*2 + x.

    Raises ValueError when a side is no multiple of the patch.
    """
    _, channels, *sizes = latents.shape
    if len(sizes) != 3 or any(size % side for size, side in zip(sizes, patch, strict=True)):
        raise ValueError(f"latents: shape {tuple(latents.shape)} is not [1, C, T, h, w] in multiples of {patch}")
    (frames, height, width), (pt, ph, pw) = sizes, patch
    cells = latents.reshape(channels, frames // pt, pt, height // ph, ph, width // pw, pw)
    return cells.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, channels * pt * ph * pw).contiguous()


def unpatchify_video(
    rows: torch.Tensor, latent_frames: int, latent_height: int, latent_width: int, patch: Patch = (1, 2, 2)
) -> torch.Tensor:
    """The exact inverse of `patchify_video`: rows [T * h/2 * w/2, C * 4] to latents [1, C, T, h, w]."""
    pt, ph, pw = patch
    channels = rows.shape[-1] // (pt * ph * pw)
    cells = rows.reshape(latent_frames // pt, latent_height // ph, latent_width // pw, channels, pt, ph, pw)
    latents = cells.permute(3, 0, 4, 1, 5, 2, 6).reshape(1, channels, latent_frames, latent_height, latent_width)
    return latents.contiguous()


def pack_audio(latents: torch.Tensor) -> torch.Tensor:
    """Audio latents [2, C, A] as rows [2A, C], channel-major."""
    return latents.permute(0, 2, 1).reshape(-1, latents.shape[1]).contiguous()


def unpack_audio(rows: torch.Tensor, audio_latents: int) -> torch.Tensor:
    """The exact inverse of `pack_audio`: rows [2A, C] to latents [2, C, A]."""
    return rows.reshape(AUDIO_CHANNELS, audio_latents, rows.shape[-1]).permute(0, 2, 1).contiguous()


def _condition_segments(
    condition: Condition, origin: float, width_axis: NDArray[np.float64], patch: Patch
) -> list[Segment]:
    """Rows of one condition: a sound's, or those of a picture after those of its sound.

    Sound alone sits at the sides of the clip's picture, `width_axis`; a video's at those of its own.
    """
    frames, height, width = condition.latent_frames, condition.latent_height, condition.latent_width
    if condition.kind == "audio":
        return [_audio(AUDIO_CONDITION_SLOT, audio_positions(origin, condition.audio_latents, width_axis))]
    picture = _video(VISUAL_CONDITION_SLOT, video_positions(origin, frames, height, width, patch))
    if not condition.audio_latents:
        return [picture]
    own_axis = spatial_axis(width, height, patch[2])
    return [_audio(AUDIO_CONDITION_SLOT, audio_positions(origin, condition.audio_latents, own_axis)), picture]


def _audio(slot: int, positions: NDArray[np.float64], target: bool = False) -> Segment:
    return Segment("audio", np.full(len(positions), AUDIO_TAG), slot, positions, target)


def _video(slot: int, positions: NDArray[np.float64], target: bool = False, grid: Grid = (0, 0, 0)) -> Segment:
    return Segment("video", np.full(len(positions), VIDEO_TAG), slot, positions, target, grid)


def _clock_units(condition: Condition) -> float:
    """Rotary time that a condition takes before the clip begins."""
    if condition.role != "reference":
        return 0.0
    if condition.kind == "image":
        return IMAGE_CLOCK_UNITS
    # The time of the frame after its last one. Summed one by one, as the released model does here: neither numpy's
    # pairwise sum nor that of Python's `sum`, which compensates from 3.12 on; both differ in the last bit.
    span = float(temporal_axis(0.0, condition.latent_frames + 1)[-1])
    return max(float(condition.audio_latents), span)


def _last_frame(origin: float, latent_frames: int) -> float:
    """Rotary time of a clip's last frame: here the released model sums pairwise, as numpy does."""
    return origin + float(_spans(latent_frames).sum()) - CLOCK_UNITS_PER_FRAME


def _spans(latent_frames: int) -> NDArray[np.float64]:
    """Rotary time of each latent frame."""
    return CLOCK_UNITS_PER_FRAME * np.resize(np.asarray(FRAMES_PER_LATENT, dtype=np.float64), latent_frames)


def _text_positions(rows: int) -> NDArray[np.float64]:
    positions = np.zeros((rows, 3))
    positions[:, 0] = np.arange(rows, dtype=np.float64)
    return positions


def _starts(segments: Sequence[Segment]) -> NDArray[np.int64]:
    return np.cumsum([0, *(segment.rows for segment in segments)])


def _row_order(segments: Sequence[Segment]) -> tuple[NDArray[np.int64], dict[Stream, NDArray[np.int64]]]:
    """Index of each packed row into cat(text, audio, video), and the packed rows of each stream in stream order."""
    starts = _starts(segments)
    indices: dict[Stream, NDArray[np.int64]] = {}
    for stream in STREAMS:
        places = [
            np.arange(start, start + segment.rows)
            for start, segment in zip(starts, segments, strict=False)
            if segment.stream == stream
        ]
        indices[stream] = np.concatenate(places) if places else np.zeros(0, dtype=np.int64)
    # cat(text, audio, video)[k] sits at packed row by_stream[k]; the gather that the prologue does is its inverse.
    return np.argsort(np.concatenate([indices[stream] for stream in STREAMS])), indices


def _target(segments: Sequence[Segment], stream: Stream) -> slice:
    starts = _starts(segments)
    found = [
        slice(int(start), int(start) + segment.rows)
        for start, segment in zip(starts, segments, strict=False)
        if segment.target and segment.stream == stream
    ]
    if len(found) != 1:
        raise ValueError(f"segments: {len(found)} generated {stream} segments, there must be exactly one")
    return found[0]


def _condition_rows(segments: Sequence[Segment], stream: Stream) -> int:
    return sum(segment.rows for segment in segments if segment.stream == stream and not segment.target)


def _int64(values: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))
