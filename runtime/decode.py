"""Latents to pixels and sound: temporal chunks of spatial tiles, stitched and handed on as soon as frames are final."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from plugins.dimensions import AUDIO_CHANNELS, AudioVAEDimensions, VideoVAEDimensions
from plugins.tiling import TileGrid, chunk_count, tile_grid
from runtime.colour import to_i420
from runtime.contract import Colour
from runtime.events import Cancellation, Reporter
from runtime.tiling import Stitcher, fade_in

DecodeTile = Callable[[torch.Tensor], torch.Tensor]
"""Normalised latents float32 [1, 24, 7, 16, 16] to ImageNet-normalised RGB float32 [1, 3, 28, 256, 256]."""

DecodeNumber = Callable[[int], torch.Tensor]
"""The frames that are used of a tile, float32 [3, 22, 256, 256], by its number in the order of chunks and places."""

TileOrder = Callable[[int, DecodeNumber, Cancellation], Iterator[torch.Tensor]]
"""Gives that many tiles in order, decoded here, on the device of the latents, or elsewhere. Raises Cancelled."""

DecodeAudio = Callable[[torch.Tensor], torch.Tensor]
"""Normalised latents float32 [2, 32, A] to waveforms float32 [2, 1, 800 A]."""

PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)
"""ImageNet statistics of the colour space that the video VAE works in."""


class DecodeError(ValueError):
    """Latents or decoder outputs that cannot become media; the message names the value and the rule."""


@dataclass(frozen=True)
class VideoPlan:
    """How a latent video is cut up for decoding, and where the frames of a decoded chunk belong (spec/model.md 6.3).

    A chunk's decoder call returns 28 frames: `body`, which only the previous chunk's tail is faded into, and `tail`,
    which the next chunk's body starts with.
    """

    dimensions: VideoVAEDimensions
    grid: TileGrid
    chunks: int

    @classmethod
    def of(cls, dimensions: VideoVAEDimensions, latent_frames: int, latent_height: int, latent_width: int) -> VideoPlan:
        """The plan of a latent video; raises DecodeError when T is not 5n + 2 with n >= 1 or a side is below a tile."""
        chunks = chunk_count(latent_frames, dimensions)
        if not chunks:
            raise DecodeError(f"latent_frames: {latent_frames} is not 5 n + 2 with n at least 1; the smallest is 7")
        if min(latent_height, latent_width) < dimensions.tile_latents:
            raise DecodeError(
                f"latent size: {latent_height} x {latent_width} has a side below {dimensions.tile_latents} cells "
                f"({dimensions.tile} pixels), the size of a decoder tile"
            )
        height, width = latent_height * dimensions.spatial_ratio, latent_width * dimensions.spatial_ratio
        return cls(dimensions, tile_grid(height, width, dimensions), chunks)

    @classmethod
    def of_latents(cls, latents: torch.Tensor, dimensions: VideoVAEDimensions) -> VideoPlan:
        """The plan of normalised latents; raises DecodeError too when they are not float32 [1, 24, T, h, w]."""
        channels = dimensions.latent_channels
        if latents.ndim != 5 or latents.shape[:2] != (1, channels) or latents.dtype != torch.float32:
            raise DecodeError(
                f"latents: {tuple(latents.shape)} {latents.dtype} is not float32 [1, {channels}, T, h, w]"
            )
        return cls.of(dimensions, *latents.shape[2:])

    @property
    def tiles(self) -> int:
        """Decoder calls of the whole video."""
        return self.chunks * self.grid.count

    @property
    def frames(self) -> int:
        """Frames of the whole video, 17 n + 5."""
        return self.chunks * self.dimensions.clip_frames + self.dimensions.frame_overlap

    def cut(self, latents: torch.Tensor, number: int) -> torch.Tensor:
        """The latents [1, 24, 7, 16, 16] of one tile, contiguous; tiles are numbered chunk by chunk, row by row."""
        chunk, place = divmod(number, self.grid.count)
        row, column = divmod(place, len(self.grid.columns.starts))
        ratio, start = self.dimensions.spatial_ratio, chunk * self.dimensions.clip_latents
        top, left = self.grid.rows.starts[row] // ratio, self.grid.columns.starts[column] // ratio
        side = self.dimensions.tile_latents
        frames = latents[:, :, start : start + self.dimensions.chunk_latents]
        return frames[..., top : top + side, left : left + side].contiguous()

    def decode(self, latents: torch.Tensor, decode_tile: DecodeTile, number: int) -> torch.Tensor:
        """What is used of one decoded tile, `used_tile`, float32. Raises DecodeError when it is not finite."""
        return _used_frames(decode_tile(self.cut(latents, number)), self)


def in_turn(count: int, decode: DecodeNumber, cancellation: Cancellation) -> Iterator[torch.Tensor]:
    """The `TileOrder` of a process that decodes alone: one tile after the other, each when it is asked for."""
    for number in range(count):
        cancellation.raise_if_cancelled(f"decoder tile {number + 1} of {count}")
        yield decode(number)


def decode_video(
    latents: torch.Tensor,
    decode_tile: DecodeTile,
    dimensions: VideoVAEDimensions,
    report: Reporter,
    cancellation: Cancellation,
) -> Iterator[torch.Tensor]:
    """Decode normalised latents float32 [1, 24, T, h, w] into uint8 frames, yielded as [n, H, W, 3] when final.

    Yields the 17 frames of each chunk, then the last 5: 17n + 5 for T = 5n + 2. Holds one stitched chunk and the
    previous tail, never the video. Checks the cancellation before each tile (Cancelled) and reports each as `decode`.
    Raises DecodeError on latents of another shape and on decoder output that is not finite.
    """
    for frames in decode_frames(latents, decode_tile, dimensions, report, cancellation):
        yield to_uint8(frames)


def decode_planes(
    latents: torch.Tensor,
    decode_tile: DecodeTile,
    dimensions: VideoVAEDimensions,
    colour: Colour,
    report: Reporter,
    cancellation: Cancellation,
    order: TileOrder = in_turn,
) -> Iterator[torch.Tensor]:
    """As `decode_video`, but yields what the encoder takes: uint8 planes [n, 3H/2, W], half the bytes of RGB.

    They are the planes of the frames that `decode_video` yields: see `to_i420`.
    """
    for frames in decode_frames(latents, decode_tile, dimensions, report, cancellation, order):
        yield to_i420(to_levels(frames), colour)


def decode_frames(
    latents: torch.Tensor,
    decode_tile: DecodeTile,
    dimensions: VideoVAEDimensions,
    report: Reporter,
    cancellation: Cancellation,
    order: TileOrder = in_turn,
) -> Iterator[torch.Tensor]:
    """As `decode_video`, but yields float32 [3, n, H, W] in the VAE's own colour space, before the conversion.

    What is yielded lives in a buffer that the next chunk overwrites. Matches diffusers' AutoencoderKLMiniMaxH3.decode.
    """
    plan = VideoPlan.of_latents(latents, dimensions)
    tiles = order(plan.tiles, partial(plan.decode, latents, decode_tile), cancellation)
    overlap, body = dimensions.frame_overlap, dimensions.clip_frames
    size = (plan.grid.rows.length, plan.grid.columns.length)
    canvas = torch.empty(3, body + overlap, *size, dtype=torch.float32, device=latents.device)
    tail = torch.empty(3, overlap, *size, dtype=torch.float32, device=latents.device)
    report("decode", 0, plan.tiles)
    for chunk in range(plan.chunks):
        _stitch_chunk(plan, chunk, tiles, canvas, report)
        if chunk:
            fade_in(canvas[:, :body], tail, overlap, dim=-3)
        tail.copy_(canvas[:, body:])
        yield canvas[:, :body]
    yield tail


def to_uint8(frames: torch.Tensor) -> torch.Tensor:
    """Float32 [3, n, H, W] in ImageNet-normalised RGB, overwritten, to uint8 [n, H, W, 3]."""
    return to_levels(frames).to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def to_levels(frames: torch.Tensor) -> torch.Tensor:
    """Float32 [3, n, H, W] in ImageNet-normalised RGB, overwritten with whole numbers 0..255.

    Clamp, then x 255, then round half to even, in float32: what diffusers' decode step and video processor do.
    """
    mean, std = (torch.tensor(values, device=frames.device).view(3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    return frames.mul_(std).add_(mean).clamp_(0, 1).mul_(255).round_()


def decode_audio(latents: torch.Tensor, decode: DecodeAudio, dimensions: AudioVAEDimensions) -> torch.Tensor:
    """Decode normalised latents float32 [2, 32, A] into a stereo waveform float32 [2, 800 A], left channel first.

    Raises DecodeError on latents or a waveform of another shape and on a waveform that is not finite.
    """
    if latents.ndim != 3 or latents.shape[:2] != (AUDIO_CHANNELS, dimensions.latent_channels):
        raise DecodeError(f"audio latents: {tuple(latents.shape)} is not [2, {dimensions.latent_channels}, A]")
    waveform = decode(latents.contiguous())
    expected = (AUDIO_CHANNELS, 1, dimensions.hop * latents.shape[2])
    if tuple(waveform.shape) != expected or not bool(torch.isfinite(waveform).all()):
        raise DecodeError(f"waveform: {tuple(waveform.shape)} from the audio decoder is not {expected} and finite")
    return waveform[:, 0].to(torch.float32)


def _stitch_chunk(
    plan: VideoPlan, chunk: int, tiles: Iterator[torch.Tensor], canvas: torch.Tensor, report: Reporter
) -> None:
    """Stitch the frames that are used of one chunk's tiles, body then tail, into the canvas."""
    stitcher = Stitcher(plan.grid, canvas)
    for number, (row, column) in enumerate(plan.grid.places(), start=chunk * plan.grid.count + 1):
        stitcher.place(row, column, next(tiles))
        report("decode", number, plan.tiles)


def _used_frames(decoded: torch.Tensor, plan: VideoPlan) -> torch.Tensor:
    """Body and tail of a decoded tile [1, 3, 28, 256, 256]; the pre-padded frames are dropped."""
    dimensions = plan.dimensions
    expected = (1, 3, dimensions.chunk_frames, dimensions.tile, dimensions.tile)
    if tuple(decoded.shape) != expected or not bool(torch.isfinite(decoded).all()):
        raise DecodeError(f"decoder tile: {tuple(decoded.shape)} is not {expected} and finite")
    pad, body, tail = dimensions.frame_pre_padding, dimensions.clip_frames, dimensions.frame_overlap
    return torch.cat([decoded[0, :, pad : pad + body], decoded[0, :, -tail:]], dim=1).to(torch.float32)
