"""The references that a request is planned with: their pixels, patches, clips and samples, and the rows they take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from engines.plan.plan import Workload
from plugins.dimensions import AUDIO_CHANNELS, AUDIO_LATENTS_PER_SECOND, FRAMES_PER_SECOND, Dimensions
from plugins.shape import canvas, floor_grid_frames, latents, nearest_side, ratio_of, requested_frames
from plugins.tiling import tile_grid

SHORT_EDGE = 2048
"""Pixels of the short side of a reference image as the reference implementation encodes it."""

MEDIA_SECONDS = 15.0
"""All reference videos together, and all sounds, last at most as long; each is planned with an equal share."""

SEEN_PER_SECOND = 2
"""Frames of a reference video that the vision encoder sees."""


@dataclass(frozen=True)
class References:
    """Sizes of a workload's references. Images and videos have the clip's ratio; every video has sound."""

    workload: Workload
    dimensions: Dimensions

    @cached_property
    def image(self) -> tuple[int, int]:
        """(width, height) of an image."""
        ratio = ratio_of(self.workload.aspect_ratio)
        return nearest_side(SHORT_EDGE * max(ratio, 1.0)), nearest_side(SHORT_EDGE / min(ratio, 1.0))

    @cached_property
    def video(self) -> tuple[int, int]:
        """(width, height) of a video."""
        return canvas(self.workload.aspect_ratio)

    @cached_property
    def frames(self) -> int:
        """Frames of a video, 17n + 5."""
        seconds = min(self.workload.seconds, MEDIA_SECONDS / max(1, self.workload.videos))
        return floor_grid_frames(requested_frames(seconds), self.dimensions.video_vae)

    @cached_property
    def samples(self) -> int:
        """Samples of one channel of a sound, whole latents."""
        seconds = min(self.workload.seconds, MEDIA_SECONDS / max(1, self.workload.sounds, self.workload.videos))
        return round(seconds * AUDIO_LATENTS_PER_SECOND) * self.dimensions.audio_vae.hop

    @property
    def tracks(self) -> int:
        """Sounds, those of videos included."""
        return self.workload.sounds + self.workload.videos

    @property
    def pictures(self) -> int:
        """What the vision encoder sees: images, and pairs of a video's frames."""
        return self.workload.images + self.workload.videos * self._pairs

    @property
    def _pairs(self) -> int:
        return math.ceil(self.frames * SEEN_PER_SECOND / FRAMES_PER_SECOND / self.dimensions.processor.temporal_patch)

    @cached_property
    def patches(self) -> tuple[int, ...]:
        """Patches of each picture."""
        processor = self.dimensions.processor
        image = min(math.prod(self.image), processor.image_max_pixels)
        shown = self._pairs * processor.temporal_patch
        video = min(math.prod(self.video), processor.video_max_pixels // shown)
        sizes = (image,) * self.workload.images + (video,) * (self.workload.videos * self._pairs)
        return tuple(size // processor.factor**2 * processor.merge**2 for size in sizes)

    @property
    def text_rows(self) -> int:
        """Rows of the language model that stand for pictures."""
        return sum(self.patches) // self.dimensions.vision.merged

    @property
    def video_rows(self) -> int:
        """Packed rows of images and videos."""
        latent_frames = latents(self.frames, self.dimensions.video_vae)
        images = self.workload.images * self._cells(self.image)
        return images + self.workload.videos * latent_frames * self._cells(self.video)

    def _cells(self, size: tuple[int, int]) -> int:
        side = self.dimensions.video_vae.spatial_ratio
        _, height, width = self.dimensions.denoiser.patch
        return (size[0] // side // width) * (size[1] // side // height)

    @property
    def audio_rows(self) -> int:
        """Packed rows of sounds."""
        return self.tracks * AUDIO_CHANNELS * self.samples // self.dimensions.audio_vae.hop

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles that the video encoder takes: of single frames, and of clips."""
        vae = self.dimensions.video_vae
        clips = math.ceil(self.frames / vae.clip_frames) * tile_grid(self.video[1], self.video[0], vae).count
        images = self.workload.images * tile_grid(self.image[1], self.image[0], vae).count
        return images, self.workload.videos * clips

    @property
    def clip_frames(self) -> int:
        """Frames of the longest tile."""
        if self.workload.videos:
            return self.dimensions.video_vae.clip_frames
        return min(1, self.workload.images)
