"""Requests that a server makes of itself before it says that it is ready: one for each range of sizes that it is for.

They find out what is broken, and have behind them whatever is done once: kernels chosen, memory taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from engines.store import Manifest
from plugins.dimensions import AUDIO_CHANNELS, FRAMES_PER_SECOND
from plugins.shape import ASPECT_RATIOS, SECONDS_MAXIMUM, SECONDS_MINIMUM, Shape, canvas, legal_frames
from runtime.contract import PROMPT_CHARACTERS, SIDE_MINIMUM
from runtime.events import Cancellation
from runtime.intake import Taken
from runtime.pipeline import STAGES, Encoded, PipelineStage, Progress
from runtime.ranked_pipeline import AnyPipeline
from runtime.task import tasks_of

WORD = "word "

SHORT_PROMPT, LONG_PROMPT, LAST_PROMPT = WORD, WORD * (PROMPT_CHARACTERS // len(WORD)), WORD * 2
"""No two alike: what is encoded already is not encoded again."""

TEXT_ROWS = 64
"""More than the short prompts have."""


@dataclass(frozen=True)
class Rehearsal:
    """Stages of a request from text, of one forward where the model lets requests choose."""

    prompt: str
    params: Mapping[str, Any]
    stages: tuple[PipelineStage, ...]


def rehearsals(manifest: Manifest, stages: Collection[PipelineStage] = STAGES) -> Iterator[Rehearsal]:
    """Those of a store's stages, the smallest size last and once more, when nothing is done for the first time.

    A profile with ranges of rows has one for the largest clip of each, and one of encoding a long prompt; further tiers
    of quality, and adapters for text to video, have one of denoising each. Without text to video there is none.
    """
    if "t2va" not in tasks_of(manifest.partitions):
        return
    for rehearsal in _of_all_stages(manifest):
        if own := tuple(stage for stage in rehearsal.stages if stage in stages):
            yield replace(rehearsal, stages=own)


def _of_all_stages(manifest: Manifest) -> Iterator[Rehearsal]:
    sizes = [_largest_within(end, manifest) for end in sorted(manifest.profile.shapes.get("rows", ()), reverse=True)]
    sizes = sizes or [_SMALLEST]
    # A student and an adapter have as many forwards as they have.
    steps = {} if manifest.student else {"num_inference_steps": 1}
    for size in sizes:
        yield _rehearsal(SHORT_PROMPT, {**size, **steps})
    smallest = {**sizes[-1], **steps}
    if len(manifest.profile.shapes.get("text_rows", ())) > 1:
        yield _rehearsal(LONG_PROMPT, smallest, "encode")
    for tier in manifest.tiers[1:]:
        yield _rehearsal(SHORT_PROMPT, {**smallest, "quality": tier.name}, "denoise")
    for name, adapter in manifest.adapters.items():
        if "t2va" in adapter.distilled.tasks:
            yield _rehearsal(SHORT_PROMPT, {**sizes[-1], "lora": {"name": name}}, "denoise")
    yield _rehearsal(LAST_PROMPT, smallest)


_SMALLEST: Mapping[str, Any] = {
    "aspect_ratio": "1:1",
    "width": SIDE_MINIMUM,
    "height": SIDE_MINIMUM,
    "duration": SECONDS_MINIMUM,
}


def _rehearsal(prompt: str, size: Mapping[str, Any], *stages: PipelineStage) -> Rehearsal:
    return Rehearsal(prompt, size, stages or STAGES)


def _largest_within(rows: int, manifest: Manifest) -> Mapping[str, Any]:
    """The request of most rows that has at most so many, text aside, at one of the standard canvases."""
    dimensions = manifest.dimensions
    best, found = 0, _SMALLEST
    for ratio, frames in itertools.product(ASPECT_RATIOS, legal_frames(dimensions.video_vae)):
        shape = Shape.of(*canvas(ratio), frames, dimensions)
        count = shape.video_rows + shape.audio_rows
        if best < count <= rows - TEXT_ROWS:
            seconds = min(SECONDS_MAXIMUM, frames / FRAMES_PER_SECOND)
            best, found = count, {"aspect_ratio": ratio, "duration": seconds}
    return found


def rehearse(pipeline: AnyPipeline, rehearsal: Rehearsal, progress: Progress) -> Taken:
    """Runs a rehearsal's stages; zeros stand for what the others would give.

    Raises RequestError for one that this machine does not admit.
    """
    taken = pipeline.take(rehearsal.prompt, rehearsal.params)
    resolved, cancellation = taken.resolved, Cancellation()
    encoded = (
        pipeline.encode(taken, progress, cancellation)
        if "encode" in rehearsal.stages
        else _encoded(taken, pipeline.manifest)
    )
    latents = [_latents(taken, pipeline.manifest)]
    if "denoise" in rehearsal.stages:
        latents = list(pipeline.denoise(resolved, encoded, progress, cancellation))
    if "decode" in rehearsal.stages:
        for video, audio in latents:
            pipeline.decode(resolved, video, audio, progress, cancellation)
    return taken


def _encoded(taken: Taken, manifest: Manifest) -> Encoded:
    """A prompt's encoding without its content."""
    size, tags = manifest.dimensions.denoiser, torch.from_numpy(taken.presented.tags)
    dtype = getattr(torch, manifest.graphs["text_encoder.embedding"].outputs[0].dtype)
    text = torch.zeros(len(tags), size.text_dim, dtype=dtype)
    return Encoded(text, tags, torch.empty(0, size.video_row), torch.empty(0, size.audio_channels))


def _latents(taken: Taken, manifest: Manifest) -> tuple[torch.Tensor, torch.Tensor]:
    """One output's latents without their content."""
    resolved, size = taken.resolved, manifest.dimensions.denoiser
    grid = (resolved.latent_frames, resolved.latent_height, resolved.latent_width)
    video = torch.zeros(1, size.video_channels, *grid)
    return video, torch.zeros(1, AUDIO_CHANNELS, size.audio_channels, resolved.audio_latents)
