"""What the files of `processor/` say of preparing images and videos for the vision tower (spec/model.md 7.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveFloat, PositiveInt

from export.checkpoint.components.configuration import parse
from export.checkpoint.components.text_encoder import TextEncoderConfig, VisionConfig
from export.checkpoint.errors import CheckpointError
from export.checkpoint.strict_json import read_object
from plugins.dimensions import Processor


class PixelLimits(BaseModel):
    """Least and most pixels after resizing, under the names that transformers gives them."""

    model_config = ConfigDict(frozen=True)

    shortest_edge: PositiveInt
    longest_edge: PositiveInt


class ProcessorConfig(BaseModel):
    """The keys of one preprocessor file that pixels depend on; values that nothing else is built for are fixed."""

    # Hugging Face preprocessor files carry keys of many library versions.
    model_config = ConfigDict(frozen=True, extra="ignore")

    size: PixelLimits
    patch_size: PositiveInt
    temporal_patch_size: PositiveInt
    merge_size: PositiveInt
    image_mean: tuple[FiniteFloat, FiniteFloat, FiniteFloat]
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat]
    resample: Literal[3] = Field(default=3, description="bicubic, as Pillow numbers it")
    do_resize: Literal[True] = True
    do_rescale: Literal[True] = True
    do_normalize: Literal[True] = True
    cap_pixels_per_frame: Literal[False] | None = None


@dataclass(frozen=True)
class Pictures:
    """How images are prepared, and the limits of pixels of videos, which are prepared alike but for them."""

    images: ProcessorConfig
    videos: PixelLimits

    def dimensions(self, config: TextEncoderConfig) -> Processor:
        """What the rest of the compiler reads; the ids of tokens are the text encoder's."""
        return Processor(
            image_min_pixels=self.images.size.shortest_edge,
            image_max_pixels=self.images.size.longest_edge,
            video_min_pixels=self.videos.shortest_edge,
            video_max_pixels=self.videos.longest_edge,
            patch=self.images.patch_size,
            temporal_patch=self.images.temporal_patch_size,
            merge=self.images.merge_size,
            mean=self.images.image_mean,
            std=self.images.image_std,
            vision_start_id=config.vision_start_token_id,
            vision_end_id=config.vision_end_token_id,
            image_pad_id=config.image_token_id,
            video_pad_id=config.video_token_id,
        )


def read_processor(image: Path, video: Path, config: TextEncoderConfig) -> Processor:
    """Reads preprocessor_config.json (`image`) and video_preprocessor_config.json (`video`).

    Raises:
        CheckpointError: a file or key is missing or wrong, or disagrees with the other file or the vision tower.
    """
    images, videos = _read(image), _read(video)
    _check_patches(images, image, config.vision_config)
    for key in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"):
        wanted, found = getattr(images, key), getattr(videos, key)
        if wanted != found:
            raise CheckpointError(video, key, f"{wanted}, as {image.name} has", found)
    return Pictures(images, videos.size).dimensions(config)


def _read(file: Path) -> ProcessorConfig:
    values = read_object(file)
    read = parse(ProcessorConfig, values | {"size": _limits(values)}, file)
    if read.size.shortest_edge > read.size.longest_edge:
        wanted = f"at most longest_edge, {read.size.longest_edge}"
        raise CheckpointError(file, "size.shortest_edge", wanted, read.size.shortest_edge)
    return read


def _limits(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`size`, over which the older spelling, `min_pixels` and `max_pixels`, goes first as in transformers."""
    older = {"shortest_edge": values.get("min_pixels"), "longest_edge": values.get("max_pixels")}
    size = values.get("size")
    given = {key: value for key, value in older.items() if value is not None}
    return (size if isinstance(size, dict) else {}) | given


def _check_patches(read: ProcessorConfig, file: Path, vision: VisionConfig) -> None:
    tower = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    for key, wanted in tower.items():
        if getattr(read, key) != wanted:
            raise CheckpointError(file, key, f"{wanted}, the vision tower's", getattr(read, key))
