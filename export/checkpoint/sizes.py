"""Collects the dimensions of a checkpoint from its components, and checks that they fit together."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export.checkpoint.catalogue import Configured
from export.checkpoint.components import audio_vae, denoiser, processor, text_encoder, video_vae
from export.checkpoint.errors import CheckpointError
from export.checkpoint.strict_json import read_object, section
from export.checkpoint.tree import Component, Tree
from plugins.dimensions import Dimensions
from plugins.distilled import Distilled

Configurations = Mapping[tuple[Component, str], Configured]


def read_dimensions(tree: Tree, configured: Configurations) -> Dimensions:
    """The sizes that all partitions share.

    Raises:
        CheckpointError: partitions or components do not fit together, or a sigma shift is missing.
    """
    first, *others = tree.partitions
    sizes = _partition_dimensions(tree, configured, first)
    for partition in others:
        if _partition_dimensions(tree, configured, partition) != sizes:
            file = configured["denoiser", partition].config_files[0]
            raise CheckpointError(file, "configuration", f"the sizes and shifts of {first}", f"others for {partition}")
    return sizes


def student_dimensions(base: Dimensions, student: Distilled) -> Dimensions:
    """Its base's sizes, with the shifts of the student's own schedule."""
    shifts = {"video_shift": student.schedule.video_shift, "audio_shift": student.schedule.audio_shift}
    return base.model_copy(update=shifts)


def _partition_dimensions(tree: Tree, configured: Configurations, partition: str) -> Dimensions:
    def config(component: Component) -> Any:
        return configured[component, partition].config

    video_shift, audio_shift = _shifts(tree, partition)
    text, text_file = config("text_encoder"), configured["text_encoder", partition].config_files[0]
    sizes = Dimensions(
        denoiser=denoiser.dimensions(config("denoiser")),
        text_encoder=text_encoder.dimensions(text, text_file),
        vision=text_encoder.vision_dimensions(text, text_file),
        processor=processor.read_processor(*tree.processor_files, text),
        video_vae=video_vae.dimensions(config("video_vae")),
        audio_vae=audio_vae.dimensions(config("audio_vae")),
        video_shift=video_shift,
        audio_shift=audio_shift,
    )
    _check_joints(sizes, configured["denoiser", partition].config_files[0])
    return sizes


def _check_joints(sizes: Dimensions, file: Path) -> None:
    video, audio = sizes.video_vae, sizes.audio_vae
    joints = {
        "text_dim": (sizes.denoiser.text_dim, sizes.text_encoder.hidden, "the text encoder's hidden_size"),
        "in_channels": (sizes.denoiser.video_channels, video.latent_channels, "the video VAE's latent channels"),
        "audio_in_channels": (sizes.denoiser.audio_channels, audio.latent_channels, "the audio VAE's latent channels"),
    }
    for key, (found, wanted, owner) in joints.items():
        if found != wanted:
            raise CheckpointError(file, key, f"{wanted}, {owner}", found)


def _shifts(tree: Tree, partition: str) -> tuple[float, float]:
    """Sigma shifts of the video and audio schedules."""
    video, audio = tree.schedule_files(partition)
    if tree.layout == "native":
        shifts = section(section(read_object(video), "_minimax_h3", video), "sigma_shift_scales", video)
        return _shift(shifts, "video", video), _shift(shifts, "audio", video)
    return _shift(read_object(video), "shift", video), _shift(read_object(audio), "shift", audio)


def _shift(values: Mapping[str, Any], key: str, file: Path) -> float:
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(file, key, "a positive sigma shift", repr(value)[:80])
    return float(value)
