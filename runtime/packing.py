"""The packed sequence of a request: which row holds what, where it lies in space and time, and which timestep it has.

A layout is a list of segments in packed order. Text-to-video-and-audio has three: text, target audio, target video.
Keyframe and reference conditions are further segments between text and the target; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from plugins.dimensions import AUDIO_CHANNELS, AUDIO_TAG, MODALITIES, TEXT_TAG, VIDEO_TAG
from runtime.schedule import AUDIO_SLOT, VIDEO_SLOT

Stream = Literal["text", "audio", "video"]
"""Inputs of the prologue, in the order in which it concatenates them."""

STREAMS: tuple[Stream, ...] = ("text", "audio", "video")

FRAMES_PER_LATENT = (1, 4, 4, 4, 4)
"""Pixel frames that successive video latent frames span, repeating."""

CLOCK_UNITS_PER_FRAME = 5.0 / 3.0
"""The rotary clock ticks once an audio latent: 40 Hz against 24 frames a second."""

SPATIAL_SCALE = 32

Patch = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive packed rows of one kind.

    stream: which prologue input holds the rows, in the order in which its segments appear. tag: modality, picks the
    AdaLN weights. slot: timestep slot. positions: float64 [rows, 3], columns t, h, w. target: rows that are generated.
    """

    stream: Stream
    tag: int
    slot: int
    positions: NDArray[np.float64]
    target: bool = False

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
    generated rows, a slice of the packed sequence each.
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

    @property
    def rows(self) -> int:
        """Packed rows S."""
        return self.token_tags.numel()


def t2va_layout(
    text_rows: int,
    latent_frames: int,
    latent_height: int,
    latent_width: int,
    audio_latents: int,
    patch: Patch = (1, 2, 2),
) -> Layout:
    """The layout of a text-only request: text, audio of both channels, video.

    Rows, tags and positions are bit-equal to diffusers' MiniMaxH3PrepareLayoutStep (spec/model.md 3.2 and 3.3).
    """
    return assemble(
        [
            Segment("text", TEXT_TAG, VIDEO_SLOT, _text_positions(text_rows)),
            Segment(
                "audio",
                AUDIO_TAG,
                AUDIO_SLOT,
                audio_positions(float(text_rows), audio_latents, spatial_axis(latent_width, latent_height, patch[2])),
                target=True,
            ),
            Segment(
                "video",
                VIDEO_TAG,
                VIDEO_SLOT,
                video_positions(float(text_rows), latent_frames, latent_height, latent_width, patch),
                target=True,
            ),
        ]
    )


def assemble(segments: Sequence[Segment]) -> Layout:
    """The layout of segments in packed order; exactly one audio and one video segment must be a target."""
    order, indices = _row_order(segments)
    tags = np.concatenate([np.full(segment.rows, segment.tag) for segment in segments])
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
    spans = CLOCK_UNITS_PER_FRAME * np.resize(np.asarray(FRAMES_PER_LATENT, dtype=np.float64), latent_frames)
    return origin + np.concatenate([np.zeros(1), np.cumsum(spans[:-1])])


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


def _int64(values: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))
