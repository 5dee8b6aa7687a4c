"""Qwen3-VL's processor as the reference pipeline calls it, on machines without torchvision.

transformers' Qwen3VLProcessor and its video half do not load without torchvision, which has no build for the torch of a
CPU host. What they compute is here put together from the parts of transformers that load: its Pillow image processor,
its video processor's smart_resize and patchify, and its own token types.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate
from transformers import Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from plugins.dimensions import Processor


class ReferenceProcessor:
    """Stands for a Qwen3VLProcessor: `image_processor`, `video_processor` and `create_mm_token_type_ids`."""

    def __init__(self, sizes: Processor) -> None:
        self.image_processor = Qwen2VLImageProcessorPil(
            size={"shortest_edge": sizes.image_min_pixels, "longest_edge": sizes.image_max_pixels}, **_common(sizes)
        )
        self.video_processor = VideoProcessor(
            size={"shortest_edge": sizes.video_min_pixels, "longest_edge": sizes.video_max_pixels}, **_common(sizes)
        )
        self.image_token_ids = [sizes.image_pad_id]
        self.video_token_ids = [sizes.video_pad_id]
        self.audio_token_ids: list[int] = []

    def create_mm_token_type_ids(self, token_ids: list[list[int]]) -> list[list[int]]:
        """0 for a token of text, 1 of an image, 2 of a video, as transformers decides it."""
        found: list[list[int]] = Qwen3VLProcessor.create_mm_token_type_ids(cast(Qwen3VLProcessor, self), token_ids)
        return found


class VideoProcessor:
    """transformers' video processor, with torch in the place of torchvision's two functions: resize and normalise."""

    def __init__(self, **sizes: Any) -> None:
        self._theirs = Qwen3VLVideoProcessor(**sizes)

    @property
    def temporal_patch_size(self) -> int:
        """Frames of a patch."""
        return self._theirs.temporal_patch_size

    def __call__(self, videos: list[NDArray[np.uint8]], do_sample_frames: bool, return_tensors: str) -> dict[str, Any]:
        """Patches and grids of videos uint8 [frames, height, width, 3], none of whose frames is left out."""
        if do_sample_frames or return_tensors != "pt":
            raise ValueError("videos: only whole ones, as tensors, are processed here")
        prepared = [self._prepared(torch.from_numpy(video).permute(0, 3, 1, 2)) for video in videos]
        patches, grids = zip(*prepared, strict=True)
        return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}

    def _prepared(self, video: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        theirs, (frames, _, height, width) = self._theirs, video.shape
        size = smart_resize(
            frames,
            height,
            width,
            temporal_factor=theirs.temporal_patch_size,
            factor=theirs.patch_size * theirs.merge_size,
            min_pixels=theirs.size["shortest_edge"],
            max_pixels=theirs.size["longest_edge"],
        )
        # torchvision resizes uint8 on a CPU with this very function, and transformers has it divide by 255 and
        # normalise at once.
        resized = interpolate(video, size, mode="bicubic", antialias=True, align_corners=False)
        scale = 1.0 / theirs.rescale_factor
        mean, std = (scale * torch.tensor(values).view(3, 1, 1) for values in (theirs.image_mean, theirs.image_std))
        values = (resized.float() - mean) / std
        patches, *grid = theirs.patchify(values[None], theirs.patch_size, theirs.merge_size, theirs.temporal_patch_size)
        return patches[0], grid


def _common(sizes: Processor) -> dict[str, Any]:
    return {
        "patch_size": sizes.patch,
        "temporal_patch_size": sizes.temporal_patch,
        "merge_size": sizes.merge,
        "image_mean": list(sizes.mean),
        "image_std": list(sizes.std),
    }
