"""Keyframes and references through the engines and through diffusers' own pipeline, which decodes the same files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from export.checkpoint import Checkpoint
from h3trt.reference import ReferencePipeline
from h3trt.verify import Check, pipeline_checks
from h3trt.verify_requests import picture, sound
from runtime.condition_cache import ConditionCache
from runtime.decode import decode_video
from runtime.events import Cancellation, Cancelled, Event, Reporter
from runtime.intake import Files, Taken
from runtime.mux import MediaOptions
from runtime.pipeline import Encoded, Pipeline
from runtime.probe import inspect_mp4
from tests.media import clips
from tests.mp4.serial import write_mp4

PROMPT = "A red fox runs over fresh snow"
CLIP: dict[str, Any] = {"duration": 5, "width": 256, "height": 256, "num_inference_steps": 1, "seed": 7}
"""The shortest clip that diffusers makes, on the smallest canvas."""

SMALL: dict[str, Any] = {**CLIP, "task": "ref2va", "reference_short_edge": 256, "video_reference_short_edge": 256}

QUICK: dict[str, Any] = {**CLIP, "duration": 4, "num_inference_steps": 1}
QUICK_REFERENCE: dict[str, Any] = {**SMALL, "duration": 4, "num_inference_steps": 1}
"""The shortest clips of this server, in one forward, where diffusers is not asked."""

EXACT = ("token_tags", "position_ids", "text_indices", "audio_indices", "video_indices", "timesteps")


@pytest.fixture(scope="module")
def video_with_sound() -> bytes:
    """Two seconds of a picture that moves. A flat one would divide rounding errors by a variance of nothing."""
    image = torch.from_numpy(np.asarray(clips.picture(256 + 48, 256)).copy())
    moving = torch.stack([image[:, shift : shift + 256] for shift in range(48)])
    options = MediaOptions(crf=18, preset="veryfast", audio_bitrate=128_000)
    return write_mp4(moving, torch.from_numpy(clips.noise(2.0, 32_000, 2)), options)


@pytest.fixture(scope="module")
def silent_video() -> bytes:
    return clips.video(clips.even(2, 24), pixels=np.asarray(clips.picture(256, 256)))


@pytest.fixture(scope="module")
def pipeline(store: Path) -> Pipeline:
    return Pipeline.open(store)


@pytest.fixture(scope="module")
def reference(pipeline: Pipeline) -> ReferencePipeline:
    return ReferencePipeline(Checkpoint.open(pipeline.manifest.checkpoint.root))


def ignore(event: Event) -> None:
    """No progress is looked at."""


def checked(pipeline: Pipeline, reference: ReferencePipeline, taken: Taken) -> None:
    """All quantities of a request within their limits, and those that are arithmetic equal to the bit."""
    checks: dict[str, Check] = {check.title: check for check in pipeline_checks(pipeline, reference, taken)}
    assert [f"{c.title}: {c.measured} {c.rule}" for c in checks.values() if not c.passed] == []
    task = taken.resolved.task
    for name in EXACT:
        assert checks[f"{task} layout: {name}, unequal elements"].measured == 0
    for name in ("video", "audio"):
        assert checks[f"{task} noise: {name} rows, unequal elements"].measured == 0
        assert checks[f"{task}: final {name} latents"].limit == 1e-4


KEYFRAMES: dict[str, dict[str, Any]] = {
    "first": {"frame_indices": [0]},
    "last": {"frame_indices": [-1]},
    "both": {"frame_indices": [0, -1]},
}


@pytest.mark.slow
@pytest.mark.parametrize("params", KEYFRAMES.values(), ids=KEYFRAMES.keys())
def test_keyframes_are_those_of_diffusers(
    params: dict[str, Any], pipeline: Pipeline, reference: ReferencePipeline
) -> None:
    """The first is stretched to the canvas, and the second covers it and is cropped: neither has its ratio."""
    pictures = [picture(288, 320, 1), picture(256, 400, 2)][: len(params["frame_indices"])]
    taken = pipeline.take(PROMPT, {**CLIP, **params}, {"image": pictures})
    assert len(taken.resolved.references) == len(pictures)
    checked(pipeline, reference, taken)


IMAGES: dict[str, Files] = {
    "one image": {"image": [picture(288, 320, 1)]},
    "two images of different ratios": {"image": [picture(288, 320, 1), picture(256, 600, 2)]},
    "an image and a sound": {"image": [picture(320, 288, 1)], "audio": [sound(3)]},
}


@pytest.mark.slow
@pytest.mark.parametrize("files", IMAGES.values(), ids=IMAGES.keys())
def test_reference_images_and_sounds_are_those_of_diffusers(
    files: Files, pipeline: Pipeline, reference: ReferencePipeline
) -> None:
    checked(pipeline, reference, pipeline.take(PROMPT, SMALL, files))


@pytest.mark.soak
def test_a_video_without_sound_is_that_of_diffusers(
    silent_video: bytes, pipeline: Pipeline, reference: ReferencePipeline
) -> None:
    taken = pipeline.take(PROMPT, SMALL, {"video": [silent_video]})
    (one,) = taken.resolved.references
    assert (one.encoded_frames, one.latent_frames, one.audio_latents, one.timestamps) == (39, 12, 0, (0.25, 1.25))
    checked(pipeline, reference, taken)


@pytest.mark.slow
def test_a_video_with_sound_among_others_is_that_of_diffusers(
    video_with_sound: bytes, pipeline: Pipeline, reference: ReferencePipeline
) -> None:
    """An order that is not that of the kinds: labels, rows and the clock follow the request."""
    files: Files = {"image": [picture(288, 320, 1)], "video": [video_with_sound], "audio": [sound(3)]}
    order = [{"type": "audio", "index": 0}, {"type": "video", "index": 0}, {"type": "image", "index": 0}]
    taken = pipeline.take(PROMPT, {**SMALL, "references": order}, files)
    assert [one.kind for one in taken.resolved.references] == ["audio", "video", "image"]
    assert taken.resolved.references[1].audio_latents >= 80
    checked(pipeline, reference, taken)


@pytest.mark.soak
def test_three_images_two_videos_and_a_sound_are_those_of_diffusers(
    video_with_sound: bytes, silent_video: bytes, pipeline: Pipeline, reference: ReferencePipeline
) -> None:
    pictures = [picture(288, 320, 1), picture(256, 600, 2), picture(300, 300, 4)]
    files: Files = {"image": pictures, "video": [video_with_sound, silent_video], "audio": [sound(3)]}
    checked(pipeline, reference, pipeline.take(PROMPT, {**SMALL, "num_inference_steps": 2}, files))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_video_of_the_usual_size_is_that_of_diffusers(
    silent_video: bytes, pipeline: Pipeline, reference: ReferencePipeline
) -> None:
    taken = pipeline.take(PROMPT, {**SMALL, "video_reference_short_edge": 768}, {"video": [silent_video]})
    checked(pipeline, reference, taken)


def square(colour: tuple[int, int, int]) -> bytes:
    return clips.saved(Image.new("RGB", (256, 256), colour), "PNG")


RED, BLUE = square((220, 20, 20)), square((20, 20, 220))


def encoded(pipeline: Pipeline, params: dict[str, Any], files: Files) -> tuple[Taken, Encoded]:
    taken = pipeline.take(PROMPT, params, files)
    return taken, pipeline.encode(taken, ignore, Cancellation())


def latents(pipeline: Pipeline, params: dict[str, Any], files: Files) -> list[torch.Tensor]:
    """Of the picture of each output."""
    taken, rows = encoded(pipeline, params, files)
    return [video for video, _ in pipeline.denoise(taken.resolved, rows, ignore, Cancellation())]


def rms(tensor: torch.Tensor) -> float:
    return tensor.square().mean().sqrt().item()


def test_what_a_reference_shows_moves_the_clip(pipeline: Pipeline) -> None:
    red, again, blue = (latents(pipeline, QUICK_REFERENCE, {"image": [image]})[0] for image in (RED, RED, BLUE))
    assert torch.equal(red, again), "the floor between two runs of one request is zero"
    # Latents are of scale 1.
    assert rms(red - blue) > 0.1


def last_frame(pipeline: Pipeline, latents: torch.Tensor) -> torch.Tensor:
    """The last decoded frame, float32 [H, W, 3]: of the decoder's last chunk alone."""
    vae, quiet = pipeline.manifest.dimensions.video_vae, Reporter(ignore, lambda: 0.0)
    chunk = latents[:, :, -vae.chunk_latents :].contiguous()
    *_, frames = decode_video(chunk, pipeline.decode_tile, vae, quiet, Cancellation())
    return frames[-1].float()


def test_the_last_keyframe_moves_the_last_frame_and_its_end_of_the_clip_matters(pipeline: Pipeline) -> None:
    both = {image: latents(pipeline, QUICK, {"image": [RED, image]})[0] for image in (RED, BLUE)}
    frames = {image: last_frame(pipeline, one) for image, one in both.items()}
    # Levels of 255. Random weights know no distance: that the first frame moves less is for trained ones to show.
    assert (frames[RED] - frames[BLUE]).abs().mean() > 2
    first, last = (latents(pipeline, {**QUICK, "frame_indices": [i]}, {"image": [BLUE]})[0] for i in (0, -1))
    assert rms(first - last) > 1e-3


def test_each_output_is_what_its_own_seed_gives_after_one_encoding(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    run = pipeline._engines.run

    def note(graph: str, *arguments: Any, **named: Any) -> Any:
        ran.append(graph)
        return run(graph, *arguments, **named)

    monkeypatch.setattr(pipeline._engines, "run", note)
    outputs = latents(pipeline, {**QUICK, "num_outputs_per_prompt": 2}, {"image": [RED]})
    assert (ran.count("video_encoder_tile"), ran.count("text_encoder.embedding"), ran.count("context")) == (1, 1, 1)
    for index, output in enumerate(outputs):
        (alone,) = latents(pipeline, {**QUICK, "seed": QUICK["seed"] + index}, {"image": [RED]})
        assert torch.equal(output, alone)
    assert rms(outputs[0] - outputs[1]) > 0.1


def test_a_request_with_references_gives_the_same_bytes_twice(pipeline: Pipeline) -> None:
    taken = pipeline.take(PROMPT, QUICK_REFERENCE, {"image": [RED], "audio": [sound(3)]})
    first, second = (list(pipeline.generate(taken, ignore, Cancellation())) for _ in range(2))
    assert first == second
    assert inspect_mp4(first[0]).problems(256, 256, taken.resolved.frames) == []


def test_a_task_in_turn_does_not_change_another(pipeline: Pipeline) -> None:
    """Both partitions, one modulation cache: the same schedule has another table in each."""
    before = latents(pipeline, QUICK | {"aspect_ratio": "1:1"}, {})[0]
    latents(pipeline, QUICK_REFERENCE, {"image": [RED]})
    assert torch.equal(before, latents(pipeline, QUICK | {"aspect_ratio": "1:1"}, {})[0])


def test_progress_counts_every_unit_of_references_and_jumps_over_what_a_cache_has(store: Path) -> None:
    pipeline = Pipeline.open(store, stages=("encode",), cache=ConditionCache(1 << 24))
    taken = pipeline.take(
        PROMPT, {**QUICK_REFERENCE, "reference_short_edge": 384}, {"image": [RED], "audio": [sound(3)]}
    )
    # 2 x 2 tiles, a soundtrack, a picture, 50 layers.
    total = 4 + 1 + 1 + 50
    seen: list[list[int]] = []
    for _ in range(2):
        events: list[Event] = []
        pipeline.encode(taken, events.append, Cancellation())
        assert {(event.stage, event.total) for event in events} == {("encode", total)}
        seen.append([event.index for event in events])
    assert seen == [list(range(total + 1)), [0, 4, 5, total]]


def test_a_request_that_is_cancelled_among_its_references_goes_no_further(pipeline: Pipeline) -> None:
    taken = pipeline.take(PROMPT, {**QUICK_REFERENCE, "reference_short_edge": 384}, {"image": [RED]})
    cancellation, seen = Cancellation(), list[int]()

    def cancel(event: Event) -> None:
        seen.append(event.index)
        if event.index == 2:
            cancellation.cancel()

    with pytest.raises(Cancelled, match="encoder tile 2, 1"):
        pipeline.encode(taken, cancel, cancellation)
    assert seen == [0, 1, 2]


def test_conditions_of_another_number_than_the_layouts_are_refused(pipeline: Pipeline) -> None:
    taken, rows = encoded(pipeline, QUICK, {"image": [RED]})
    short = dataclasses.replace(rows, condition_video=rows.condition_video[1:])
    with pytest.raises(ValueError, match="63"):
        list(pipeline.denoise(taken.resolved, short, ignore, Cancellation()))
