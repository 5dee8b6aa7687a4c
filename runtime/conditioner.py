"""References through the engines: condition rows for the denoiser, and pictures for the text encoder."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from engines.sessions.engine_set import EngineSet
from runtime.conditioning import condition_latents, condition_sound, encoder_tiles
from runtime.encoder import Placed
from runtime.events import Units
from runtime.packing import patchify_video
from runtime.presentation import Presentation, VisionBlock
from runtime.processor import vision_patches
from runtime.reference_pixels import ReferencePixels
from runtime.references import Reference
from runtime.vision import VisionEncoder

CONDITIONING = ("video_encoder_tile", "audio_encoder")
"""The graphs that make condition rows."""


class Conditioner:
    """Encodes the references of a request, one after the other."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._dimensions = engines.manifest.dimensions
        self._vision = VisionEncoder(engines)

    def units(self, reference: Reference) -> int:
        """Units that the rows of a reference take: a tile each, and a soundtrack."""
        pictures = 0
        if reference.encoded_frames:
            sides = (reference.height, reference.width)
            pictures = encoder_tiles(reference.encoded_frames, *sides, self._dimensions.video_vae)
        return pictures + bool(reference.audio_latents)

    def rows(
        self, reference: Reference, pixels: ReferencePixels, shown: Collection[int], seed: int, units: Units
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clean normalised rows float32 on the CPU: of the picture [Nc, 96] and of the sound [2A, 32]; none: no rows.

        shown: frames that the text encoder will be shown, to be kept. Raises RequestError, ConditionError, Cancelled.
        """
        denoiser = self._dimensions.denoiser
        video, audio = torch.empty(0, denoiser.video_row), torch.empty(0, denoiser.audio_channels)
        if reference.encoded_frames:
            frames = pixels.frames(shown)
            latents = condition_latents(frames, self._encode_tile, self._dimensions.video_vae, units, seed)
            video = patchify_video(latents, denoiser.patch)
        if reference.audio_latents:
            with units.one("a soundtrack"):
                audio = condition_sound(pixels.sound(), self._encode_sound, self._dimensions.audio_vae)
        return video, audio

    def pictures(self, presented: Presentation, media: Sequence[ReferencePixels], units: Units) -> list[Placed]:
        """What the vision tower makes of every vision block, one unit each. Raises RequestError and Cancelled."""
        return [self._placed(block, media[block.reference], units) for block in presented.vision]

    def _placed(self, block: VisionBlock, pixels: ReferencePixels, units: Units) -> Placed:
        grid = (block.grid[1], block.grid[2])
        patches = vision_patches(pixels.shown(block.frames), grid, self._dimensions.processor)
        return Placed(self._vision.encode(patches, grid, units), block.first_row)

    def _encode_tile(self, frames: torch.Tensor) -> torch.Tensor:
        return self._engines.run("video_encoder_tile", {"frames": frames})["moments"]

    def _encode_sound(self, waveform: torch.Tensor) -> torch.Tensor:
        return self._engines.run("audio_encoder", {"waveform": waveform})["mean"]
