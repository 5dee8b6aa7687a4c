"""Reference media to condition rows: pixels through the video VAE's encoder, sound through the audio VAE's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch.nn.functional import pad

from plugins.dimensions import AUDIO_CHANNELS, AudioVAEDimensions, VideoVAEDimensions
from plugins.tiling import TileGrid, tile_grid
from runtime.decode import PIXEL_MEAN, PIXEL_STD
from runtime.events import Units
from runtime.packing import pack_audio
from runtime.tiling import Stitcher

EncodeTile = Callable[[torch.Tensor], torch.Tensor]
"""Frames float32 [1, 3, 1 or 17, 256, 256], ImageNet-normalised, to moments float32 [1, 48, 1 or 5, 16, 16]."""

EncodeSound = Callable[[torch.Tensor], torch.Tensor]
"""A stereo waveform float32 [2, 1, 800 A] to the posterior's means float32 [2, 32, A]."""

LOGVAR_MINIMUM, LOGVAR_MAXIMUM = -30.0, 20.0


class ConditionError(ValueError):
    """Pixels, sound or encoder outputs that cannot become conditions; the message names the value and the rule."""


def encoder_tiles(frames: int, height: int, width: int, dimensions: VideoVAEDimensions) -> int:
    """Encoder calls of a picture (1 frame) or a video of that many frames."""
    return -(-frames // dimensions.clip_frames) * tile_grid(height, width, dimensions).count


def condition_latents(
    frames: Iterable[torch.Tensor],
    encode_tile: EncodeTile,
    dimensions: VideoVAEDimensions,
    units: Units,
    seed: int,
) -> torch.Tensor:
    """Normalised latents float32 [1, 24, T, h, w] on the CPU of frames uint8 [H, W, 3], as the sampler conditions on.

    One frame gives T = 1; 17n + 5 frames give 5n + 2. Frames are taken as they come and a clip of 17 is held, never
    the video. Equal to diffusers' encode_vae_condition (spec/model.md 3.5 and 6.1), but for the order of float32 sums
    in the encoder. One unit a tile. Raises Cancelled and ConditionError.
    """
    moments = video_moments(frames, encode_tile, dimensions, units)
    latents = sample_posterior(moments, seed)
    # The release keeps conditions in float16 before it normalises them: part of what the model was trained on.
    return _normalised(latents.to(torch.float16).float(), dimensions)


def video_moments(
    frames: Iterable[torch.Tensor], encode_tile: EncodeTile, dimensions: VideoVAEDimensions, units: Units
) -> torch.Tensor:
    """Means and log variances float32 [1, 48, T, h, w] on the CPU of the posterior of frames uint8 [H, W, 3]."""
    source, clips = iter(frames), list[torch.Tensor]()
    while clip := list(itertools.islice(source, dimensions.clip_frames)):
        single = not clips and len(clip) == 1
        clip += [] if single else [clip[-1]] * (dimensions.clip_frames - len(clip))
        clips.append(_encode_clip(torch.stack(clip), encode_tile, dimensions, units))
        if single:
            return clips[0].unsqueeze(0)
    if not clips:
        raise ConditionError("frames: a condition must have at least one")
    return torch.cat(clips, dim=1)[:, : -dimensions.token_drop].unsqueeze(0)


def sample_posterior(moments: torch.Tensor, seed: int) -> torch.Tensor:
    """A sample float32 [1, 24, T, h, w] of the posterior with moments [1, 48, T, h, w] (mean, then log variance).

    Drawn from a CPU generator of that seed: on a GPU the same seed would draw other numbers.
    """
    mean, logvar = moments.chunk(2, dim=1)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return mean + torch.exp(0.5 * logvar.clamp(LOGVAR_MINIMUM, LOGVAR_MAXIMUM)) * noise


def condition_sound(waveform: torch.Tensor, encode: EncodeSound, dimensions: AudioVAEDimensions) -> torch.Tensor:
    """Normalised rows float32 [2A, 32], left channel first, of a stereo waveform float32 [2, n] at the VAE's rate.

    Filled up with silence to whole latents. Soundtracks take the posterior's mean (spec/model.md 3.5). Raises
    ConditionError on a waveform or encoder output of another shape and on an output that is not finite.
    """
    if waveform.ndim != 2 or len(waveform) != AUDIO_CHANNELS or not waveform.shape[1]:
        raise ConditionError(f"waveform: {tuple(waveform.shape)} is not [2, samples]")
    filled = pad(waveform, (0, -waveform.shape[1] % dimensions.hop)).unsqueeze(1)
    mean = encode(filled)
    expected = (AUDIO_CHANNELS, dimensions.latent_channels, filled.shape[-1] // dimensions.hop)
    _check_output("audio encoder", mean, expected)
    rows = pack_audio(mean.float().cpu())
    return (rows - torch.tensor(dimensions.latents_mean)) / torch.tensor(dimensions.latents_std)


def _encode_clip(
    clip: torch.Tensor, encode_tile: EncodeTile, dimensions: VideoVAEDimensions, units: Units
) -> torch.Tensor:
    """Moments float32 [48, 1 or 5, h, w] of one clip uint8 [1 or 17, H, W, 3], its tiles blended."""
    frames, height, width, _ = clip.shape
    grid = tile_grid(height, width, dimensions)
    if min(height, width) < dimensions.tile:
        raise ConditionError(f"frames: {height} x {width} has a side below {dimensions.tile}, the encoder's tile")
    cells = _latent_grid(height, width, dimensions)
    latent_frames = 1 if frames == 1 else dimensions.clip_latents
    moments = torch.empty(2 * dimensions.latent_channels, latent_frames, cells.rows.length, cells.columns.length)
    stitcher = Stitcher(cells, moments)
    for row, column in grid.places():
        with units.one(f"encoder tile {row + 1}, {column + 1} of {height} x {width} pixels"):
            top, left = grid.rows.starts[row], grid.columns.starts[column]
            tile = clip[:, top : top + dimensions.tile, left : left + dimensions.tile]
            encoded = encode_tile(_imagenet(tile))
            side = dimensions.tile_latents
            _check_output("encoder tile", encoded, (1, len(moments), latent_frames, side, side))
            stitcher.place(row, column, encoded[0].float().cpu())
    return moments


def _imagenet(frames: torch.Tensor) -> torch.Tensor:
    """Frames uint8 [n, H, W, 3] as the VAE takes them, float32 [1, 3, n, H, W]."""
    mean, std = (torch.tensor(values).view(3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    return ((frames.permute(3, 0, 1, 2).float().div(255.0) - mean) / std).unsqueeze(0)


def _latent_grid(height: int, width: int, dimensions: VideoVAEDimensions) -> TileGrid:
    """The tiles in units of latent cells, in which their overlaps are blended."""
    ratio = dimensions.spatial_ratio
    return TileGrid.cover(
        height // ratio, width // ratio, dimensions.tile_latents, dimensions.tile_overlap // ratio, step=1
    )


def _normalised(latents: torch.Tensor, dimensions: VideoVAEDimensions) -> torch.Tensor:
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (dimensions.latents_mean, dimensions.latents_std))
    return (latents - mean) / std


def _check_output(graph: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected or not bool(torch.isfinite(tensor).all()):
        raise ConditionError(f"{graph}: {tuple(tensor.shape)} is not {expected} and finite")
