"""The video decoder over the tiles of a clip, and the way from its frames to the finished MP4."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import host
from bench.measuring import Timing, in_turns, kernels
from bench.requests import default_media
from bench.synthetic import DEVICE, PARTITION, Wanted, open_engines, synthetic_store
from engines.profile import Profile
from engines.sessions.engine_set import EngineSet
from plugins.shape import Shape, canvas, grid_frames, requested_frames
from runtime.decode import decode_planes
from runtime.events import Cancellation, Reporter
from runtime.mux import Mp4Writer

SECONDS = 10
ASPECT_RATIO = "16:9"
GRAPHS = ("video_decoder_tile",)


def measure(folder: Path, profile: Profile, rounds: int = 1) -> dict[str, Any]:
    """Milliseconds of a tile, of all tiles of a clip with stitching and conversion, and of the MP4 from them."""
    engines = open_decoder(folder, profile)
    shape, latents = clip_of(engines)
    tile = latents[:, :, :7, :16, :16].contiguous()
    one = in_turns({"tile": lambda: decode_tile(engines)(tile)})["tile"]
    list(decoded(engines, latents))
    clips = [_timed(lambda: [frames.cpu() for frames in decoded(engines, latents)]) for _ in range(rounds)]
    frames = [part.cpu() for part in decoded(engines, latents)]
    media = Timing(tuple(1e3 * _timed(lambda: _encode(shape, frames)) for _ in range(rounds)))
    return {
        "what": f"decoding {shape.frames} frames of {shape.width}x{shape.height}",
        "host": host.describe(),
        "profile": profile.name,
        "tile": one.as_json(),
        "clip": Timing(tuple(1e3 * each for each in clips)).as_json(),
        "mp4 from frames in host memory": media.as_json(),
        "kernels of a tile": kernels(lambda: decode_tile(engines)(tile)),
    }


def open_decoder(folder: Path, profile: Profile) -> EngineSet:
    """The video decoder alone, at released dimensions with random weights."""
    return open_engines(synthetic_store(Wanted(profile, GRAPHS), folder), GRAPHS)


def clip_of(engines: EngineSet) -> tuple[Shape, torch.Tensor]:
    """A clip's shape, and random latents of it on the device."""
    dimensions = engines.manifest.dimensions
    shape = Shape.of(*canvas(ASPECT_RATIO), grid_frames(requested_frames(SECONDS), dimensions.video_vae), dimensions)
    return shape, _latents(shape, dimensions.video_vae.latent_channels)


def decode_tile(engines: EngineSet) -> Callable[[torch.Tensor], torch.Tensor]:
    """The engine as a function of a tile's latents."""
    return lambda latents: engines.run("video_decoder_tile", {"latents": latents}, 0, PARTITION)["frames"]


def _latents(shape: Shape, channels: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(3)
    sizes = 1, channels, shape.latent_frames, shape.latent_height, shape.latent_width
    return torch.randn(sizes, device=DEVICE, generator=generator)


def decoded(engines: EngineSet, latents: torch.Tensor) -> Iterator[torch.Tensor]:
    """The clip's planes, chunk by chunk, on the device."""
    vae = engines.manifest.dimensions.video_vae
    return decode_planes(latents, decode_tile(engines), vae, "bt709", Reporter.silent(), Cancellation())


def _encode(shape: Shape, frames: list[torch.Tensor]) -> bytes:
    pieces: list[bytes] = []
    with Mp4Writer(shape.width, shape.height, 32_000, default_media(), pieces.append) as writer:
        writer.write_audio(torch.randn(2, 800 * shape.audio_latents).clamp_(-1, 1).numpy())
        for part in frames:
            writer.write_frames(part.numpy())
        writer.finish()
    return b"".join(pieces)


def _timed(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started
