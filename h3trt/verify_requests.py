"""The requests that `h3trt verify` makes: one of each task that a store serves, with media that it draws itself."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Mapping

import numpy as np
from PIL import Image

from runtime.intake import Files, Taken, limits_of
from runtime.pipeline import Pipeline
from runtime.task import Task

PROMPT = "A red fox trots through fresh snow <d>Listen.</d> while the wind rises"
SECONDS = 5
SIDE = 256
"""The smallest canvas, and the shortest clip that diffusers accepts (124 frames)."""

PARTICULAR: Mapping[Task, Mapping[str, object]] = {
    "t2va": {"aspect_ratio": "1:1"},
    "fl2va": {},
    "ref2va": {"reference_short_edge": SIDE},
}
"""Parameters that only one task takes."""

SOUND_SECONDS = 2
SOUND_RATE = 32_000
"""What the audio encoder takes: diffusers resamples with torchaudio only, which need not be there."""


def requests(pipeline: Pipeline, forwards: int, seed: int) -> Iterator[Taken]:
    """A request of each task that the store serves; a student has its own number of forwards."""
    student = pipeline.manifest.student
    forwards = forwards if student is None else student.schedule.forwards
    for task in limits_of(pipeline.manifest).tasks:
        shape = {"duration": SECONDS, "width": SIDE, "height": SIDE}
        params = {"task": task, **shape, "num_inference_steps": forwards, "seed": seed, **PARTICULAR[task]}
        yield pipeline.take(PROMPT, params, files(task))


def files(task: Task) -> Files:
    """Two keyframes, or an image and a sound to refer to."""
    if task == "t2va":
        return {}
    if task == "fl2va":
        return {"image": [picture(288, 320, 1), picture(256, 400, 2)]}
    return {"image": [picture(288, 320, 1)], "audio": [sound(3)]}


def picture(height: int, width: int, seed: int) -> bytes:
    """A PNG file of soft colours."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def sound(seed: int) -> bytes:
    """A WAV file of two channels of noise, swelling."""
    samples = SOUND_SECONDS * SOUND_RATE
    noise = np.random.default_rng(seed).standard_normal((samples, 2)) * np.linspace(0, 8000, samples)[:, None]
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(2)
        written.setsampwidth(2)
        written.setframerate(SOUND_RATE)
        written.writeframes(noise.clip(-32768, 32767).astype("<i2").tobytes())
    return file.getvalue()
