"""Measures a warm request on the engines against diffusers' modular pipeline, side by side, on this machine's CPU.

    python bench/request_vs_diffusers.py build/demo/engines --out bench/results/request_vs_diffusers.json

Both sides run the same checkpoint in float32 on the same threads, in turns, each round with another seed: prompt to
decoded frames and waveform. The finished MP4, which diffusers does not make, is timed apart. The report has the
machine's load averages: where they are above what this program itself makes, only the ratio is of use.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engines.machine import available_processors
from export.checkpoint import Checkpoint
from h3trt.reference import ReferencePipeline
from runtime.decode import decode_video
from runtime.events import Cancellation, Reporter, ignore
from runtime.intake import Taken
from runtime.pipeline import Pipeline

PROMPT = "A red fox runs over fresh snow at dawn, its steps crunching, a raven calling far away."
SHAPE = {"duration": 5, "aspect_ratio": "1:1", "width": 256, "height": 256}
"""124 frames: the shortest clip that diffusers makes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the result."""
    options = _parse(arguments)
    torch.set_num_threads(available_processors())
    pipeline = Pipeline.open(options.store)
    pipeline.warm()
    reference = ReferencePipeline(Checkpoint.open(pipeline.manifest.checkpoint.root))
    sides: dict[str, Callable[[Taken], object]] = {
        "engines": lambda taken: media(pipeline, taken),
        "engines, to MP4": lambda taken: list(pipeline.generate(taken, ignore, Cancellation())),
        "diffusers": lambda taken: reference.run(taken.resolved),
    }
    seconds = measure(sides, pipeline, options.forwards, options.rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report(pipeline, options.forwards, seconds), indent=1) + "\n")


def measure(
    sides: dict[str, Callable[[Taken], object]], pipeline: Pipeline, forwards: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round by side; a first round is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds + 1):
        taken = pipeline.take(PROMPT, {**SHAPE, "num_inference_steps": forwards, "seed": index})
        for name, run in sides.items():
            started = time.perf_counter()
            run(taken)
            if index:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def media(pipeline: Pipeline, taken: Taken) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames and waveform of a request: what diffusers' pipeline returns."""
    never = Cancellation()
    encoded = pipeline.encode(taken, ignore, never)
    ((video, audio),) = pipeline.denoise(taken.resolved, encoded, ignore, never)
    vae, quiet = pipeline.manifest.dimensions.video_vae, Reporter.silent()
    frames = torch.cat(list(decode_video(video, pipeline.decode_tile, vae, quiet, never)))
    return frames, pipeline.waveform(audio[0])


def report(pipeline: Pipeline, forwards: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """The measurement with what it was taken on."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "what": f"124 frames of 256x256, {forwards} forwards, miniature checkpoint, float32; warm; seconds",
        "excludes": "start, loading and a first request; no server; and for two of the sides the MP4",
        "machine": {"processors": available_processors(), "architecture": platform.machine(), "load": os.getloadavg()},
        "versions": pipeline.manifest.versions,
        "median": medians,
        "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
        "diffusers / engines": medians["diffusers"] / medians["engines"],
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path, help="engine store of a miniature checkpoint")
    parser.add_argument("--forwards", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/results/request_vs_diffusers.json"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
